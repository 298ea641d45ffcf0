# An answer as it is written, and its cost at the end.  pip install openai
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python openai_stream.py
from openai import OpenAI

client = OpenAI()
stream = client.chat.completions.create(
    model="smol-135m",
    messages=[{"role": "user", "content": "Name three colours."}],
    max_tokens=32,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        print(f"\n{chunk.usage.prompt_tokens} tokens of prompt, {chunk.usage.completion_tokens} of answer")
