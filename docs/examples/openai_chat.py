# A chat, and what it cost in tokens.  pip install openai
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python openai_chat.py
from openai import OpenAI

client = OpenAI()
completion = client.chat.completions.create(
    model="smol-135m",
    messages=[
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    max_tokens=32,
    temperature=0,
)
print(completion.choices[0].message.content)
assert completion.usage is not None
print(f"{completion.usage.prompt_tokens} tokens of prompt, {completion.usage.completion_tokens} of answer")
