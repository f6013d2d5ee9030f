"""LlamaIndex: the knob goes into `additional_kwargs`, the report is in the answer's `raw`.

    pip install "sgl-kvc[examples]"
"""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model="recall",
    api_base=os.environ.get("SGL_KVC_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SGL_KVC_KEY", "none"),
    is_chat_model=True,
    temperature=0,
    max_tokens=8,
    additional_kwargs={"extra_body": {"kv_compression": {"rate": 8}}},
)
document = "the code for red falcon is tango seven kilo . "
document += "the old river waits near the quiet village . " * 100
question = ChatMessage(role="user", content=document + "what is the code for red falcon ?")

answer = llm.chat([question])
print(answer.message.content, answer.raw.kv_compression)

for part in llm.stream_chat([question]):
    print(part.delta, end="|", flush=True)
print(part.raw.kv_compression)  # the last chunk has it
