"""OpenAI's client: the knob goes into `extra_body`, the report is a field of the answer."""

import os

from openai import OpenAI

URL = os.environ.get("SGL_KVC_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("SGL_KVC_KEY", "none"))

document = "the code for red falcon is tango seven kilo . "
document += "the old river waits near the quiet village . " * 100
request = {
    "model": "recall",
    "messages": [{"role": "user", "content": document + "what is the code for red falcon ?"}],
    "temperature": 0,
    "max_tokens": 8,
    "extra_body": {"kv_compression": {"rate": 8}},
}

answer = client.chat.completions.create(**request)
print(answer.choices[0].message.content)
print(answer.kv_compression)  # KVs kept per head, blocks and bytes before and after

for chunk in client.chat.completions.create(**request, stream=True):
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print("\n", chunk.kv_compression, sep="")  # the last chunk has it
