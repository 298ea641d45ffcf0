# An answer as it is written, and its cost at the end.  pip install litellm
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python litellm_stream.py
import litellm

stream = litellm.completion(
    model="openai/smol-135m",
    messages=[{"role": "user", "content": "Name three colours."}],
    max_tokens=32,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if (usage := getattr(chunk, "usage", None)) is not None:
        print(f"\n{usage.prompt_tokens} tokens of prompt, {usage.completion_tokens} of answer")
