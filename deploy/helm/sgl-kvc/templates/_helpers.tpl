{{- define "sgl-kvc.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "sgl-kvc.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "sgl-kvc.name" . -}}
{{- (contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name)) | trunc 30 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Name of a component of a pool: (dict "root" $ "component" "worker" "pool" $pool). */}}
{{- define "sgl-kvc.component" -}}
{{- $suffix := eq .pool "default" | ternary "" (printf "-%s" .pool) -}}
{{- printf "%s-%s%s" (include "sgl-kvc.fullname" .root) .component $suffix -}}
{{- end -}}

{{- define "sgl-kvc.selector" -}}
app.kubernetes.io/name: {{ include "sgl-kvc.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
sgl-kvc/pool: {{ .pool }}
{{- end -}}

{{- define "sgl-kvc.labels" -}}
{{ include "sgl-kvc.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: sgl-kvc
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A pool's values: those of all pools, and over them its own. YAML of {gateway, worker, autoscaling}. */}}
{{- define "sgl-kvc.values" -}}
{{- $own := index .root.Values.pools .pool | default dict -}}
{{- $merged := dict -}}
{{- range $part := list "gateway" "worker" "autoscaling" -}}
{{- $all := deepCopy (index $.root.Values $part) -}}
{{- $_ := set $merged $part (mergeOverwrite $all (index $own $part | default dict)) -}}
{{- end -}}
{{- toYaml $merged -}}
{{- end -}}

{{/* (dict "root" $ "image" .Values.images.gateway) */}}
{{- define "sgl-kvc.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "sgl-kvc.serviceAccount" -}}
{{- .Values.serviceAccount.create | ternary (.Values.serviceAccount.name | default (include "sgl-kvc.fullname" .)) (.Values.serviceAccount.name | default "default") -}}
{{- end -}}

{{/* Of every pod and container: not root, nothing to gain, nothing to write but what is mounted. */}}
{{- define "sgl-kvc.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}
{{- define "sgl-kvc.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Where pods run: .part is gateway, worker or router of the values. */}}
{{- define "sgl-kvc.scheduling" -}}
{{- with .part.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Entries of a container's env: plain ones of the values. */}}
{{- define "sgl-kvc.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* The keys between gateway, router and workers, as variables; .root and .names: variable by key. */}}
{{- define "sgl-kvc.workerKeys" -}}
{{- with .root.Values.workerKeys }}
{{- if .existingSecret }}
- name: SGL_KVC_API_KEY
  valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .apiKey }}}}
- name: SGL_KVC_ADMIN_API_KEY
  valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .adminKey }}, optional: true}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Labels by which a series of Prometheus is a pool's worker's: the operator's target labels. */}}
{{- define "sgl-kvc.series" -}}
job="sgl-kvc-worker",namespace="{{ .root.Release.Namespace }}",service="{{ include "sgl-kvc.component" (dict "root" .root "component" "worker" "pool" .pool) }}"
{{- end -}}
