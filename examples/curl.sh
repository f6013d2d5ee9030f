#!/usr/bin/env bash
# curl: the knob is a field of the body, the report a field of the answer.
set -euo pipefail
filler=$(printf 'the old river waits near the quiet village . %.0s' {1..100})
curl -fsS "${SGL_KVC_URL:-http://127.0.0.1:8000}/v1/chat/completions" \
  -H 'Content-Type: application/json' \
  -H "Authorization: Bearer ${SGL_KVC_KEY:-none}" \
  -d @- <<JSON
{
  "model": "recall", "max_tokens": 8, "temperature": 0,
  "messages": [{"role": "user", "content":
    "the code for red falcon is tango seven kilo . ${filler}what is the code for red falcon ?"}],
  "kv_compression": {"rate": 8}
}
JSON
