"""LangChain: its `ChatOpenAI` with the report kept, which it would drop.

    pip install "sgl-kvc[examples]"
"""

import os
from typing import Any

from langchain_openai import ChatOpenAI

REPORT = "kv_compression"


class ChatKVC(ChatOpenAI):
    """`ChatOpenAI` whose messages have the report in ``response_metadata["kv_compression"]``."""

    def _create_chat_result(self, response: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._create_chat_result(response, *args, **kwargs)
        body = response if isinstance(response, dict) else response.model_dump()
        for generation in result.generations:
            generation.message.response_metadata[REPORT] = body.get(REPORT)
        return result

    def _convert_chunk_to_generation_chunk(self, chunk: dict, *args: Any, **kwargs: Any) -> Any:
        generation = super()._convert_chunk_to_generation_chunk(chunk, *args, **kwargs)
        if generation is not None and chunk.get(REPORT) is not None:
            generation.message.response_metadata[REPORT] = chunk[REPORT]
        return generation


model = ChatKVC(
    model="recall",
    base_url=os.environ.get("SGL_KVC_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SGL_KVC_KEY", "none"),
    temperature=0,
    max_tokens=8,
    extra_body={"kv_compression": {"rate": 8}},
)
document = "the code for red falcon is tango seven kilo . "
document += "the old river waits near the quiet village . " * 100
question = document + "what is the code for red falcon ?"

message = model.invoke(question)
print(message.content, message.response_metadata[REPORT])

whole = None
for chunk in model.stream(question):
    print(chunk.content, end="|", flush=True)
    whole = chunk if whole is None else whole + chunk
print(whole.response_metadata[REPORT])
