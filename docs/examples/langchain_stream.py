# An answer as it is written; with a base URL, LangChain asks for the cost if told to.  pip install langchain-openai
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python langchain_stream.py
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="smol-135m", max_tokens=32, temperature=0, stream_usage=True)
for chunk in model.stream("Name three colours."):
    print(chunk.text, end="", flush=True)
    if chunk.usage_metadata is not None:
        print(f"\n{chunk.usage_metadata['input_tokens']} tokens of prompt, ", end="")
        print(f"{chunk.usage_metadata['output_tokens']} of answer")
