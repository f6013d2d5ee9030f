{{/* A worker's pod: (dict "root" $ "pool" $pool "w" its values "rank" none, or a node's of several). */}}
{{- define "sgl-kvc.workerPod" -}}
{{- $w := .w -}}
{{- $about := dict "root" .root "component" "worker" "pool" .pool -}}
{{- $claim := or $w.modelCache.existingClaim $w.modelCache.create -}}
metadata:
  labels:
    {{- include "sgl-kvc.labels" $about | nindent 4 }}
    sgl-kvc/role: {{ .role }}
  {{- with $w.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "sgl-kvc.serviceAccount" .root }}
  automountServiceAccountToken: false
  # SGLang answers what runs after SIGTERM, without a limit of its own; 20 s are for its processes.
  terminationGracePeriodSeconds: {{ add (int $w.preStopSeconds) (int $w.drainSeconds) 20 }}
  securityContext: {{- include "sgl-kvc.podSecurity" .root | nindent 4 }}
  {{- include "sgl-kvc.scheduling" (dict "root" .root "part" $w) | nindent 2 }}
  {{- with $w.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "sgl-kvc.image" (dict "root" .root "image" .root.Values.images.worker) | quote }}
      imagePullPolicy: {{ .root.Values.images.worker.pullPolicy }}
      command: [python, -m, sglang.launch_server]
      args:
        - --host=0.0.0.0
        - --port={{ int $w.port }}
        - --model-path={{ $w.model.path }}
        {{- with $w.model.servedName }}
        - --served-model-name={{ . }}
        {{- end }}
        - --attention-backend=kvc
        - --radix-cache-backend=kvc
        - --page-size={{ int $w.pageSize }}
        - --tensor-parallel-size={{ int $w.tensorParallel }}
        {{- if gt (int $w.nodes) 1 }}
        - --nnodes=$(LWS_GROUP_SIZE)
        - --node-rank=$(LWS_WORKER_INDEX)
        - --dist-init-addr=$(LWS_LEADER_ADDRESS):20000
        {{- end }}
        {{- if $w.memoryFraction }}
        - --mem-fraction-static={{ $w.memoryFraction }}
        {{- end }}
        {{- if $w.contextLength }}
        - --context-length={{ int $w.contextLength }}
        {{- end }}
        - --enable-metrics
        - --enable-cache-report
        {{- range $w.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      env:
        - {name: HOME, value: /home/kvc}
        - {name: TMPDIR, value: /tmp}
        - {name: XDG_CACHE_HOME, value: /home/kvc/.cache}
        - {name: HF_HOME, value: /models/huggingface}
        - {name: SGL_KVC_CACHE, value: /models/sgl-kvc}
        {{- if $w.offline }}
        - {name: HF_HUB_OFFLINE, value: "1"}
        {{- end }}
        {{- if $w.huggingFaceToken.existingSecret }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ $w.huggingFaceToken.existingSecret }}, key: {{ $w.huggingFaceToken.key }}}}
        {{- end }}
        {{- include "sgl-kvc.workerKeys" (dict "root" .root) | nindent 8 }}
        {{- include "sgl-kvc.env" $w.env | nindent 8 }}
      ports:
        - {name: http, containerPort: {{ int $w.port }}, protocol: TCP}
      {{- if eq .role "leader" }}
      # /health goes through the engine, takes a second at least, and is 503 when it says nothing for
      # 20 s. Both keys leave it open. Only the first node of several answers.
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 25
        failureThreshold: {{ div (add (int $w.startupSeconds) 9) 10 }}
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 25
        failureThreshold: 2
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 30
        timeoutSeconds: 25
        failureThreshold: 5
      {{- end }}
      lifecycle:
        preStop:
          exec: {command: [sleep, {{ $w.preStopSeconds | quote }}]}
      securityContext: {{- include "sgl-kvc.containerSecurity" .root | nindent 8 }}
      resources:
        requests: {{- toYaml ($w.resources.requests | default dict) | nindent 10 }}
        {{- $limits := deepCopy ($w.resources.limits | default dict) }}
        {{- if $w.gpu.count }}
        {{- $_ := set $limits $w.gpu.resource (int $w.gpu.count) }}
        {{- end }}
        limits: {{- toYaml $limits | nindent 10 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: home, mountPath: /home/kvc}
        - {name: models, mountPath: /models}
        - {name: shm, mountPath: /dev/shm}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 10Gi}
    - name: home
      emptyDir: {sizeLimit: {{ $w.cacheSize }}}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $w.shmSize }}}
    {{- if $w.modelCache.existingClaim }}
    - name: models
      persistentVolumeClaim: {claimName: {{ $w.modelCache.existingClaim }}}
    {{- else if not $w.modelCache.create }}
    - name: models
      emptyDir: {sizeLimit: {{ $w.modelCache.emptyDirLimit }}}
    {{- end }}
{{- end -}}
