# A chat, and what it cost in tokens; "openai/" before the model's id says which protocol.  pip install litellm
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python litellm_chat.py
import litellm

response = litellm.completion(
    model="openai/smol-135m",
    messages=[
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    max_tokens=32,
    temperature=0,
)
print(response.choices[0].message.content)
print(f"{response.usage.prompt_tokens} tokens of prompt, {response.usage.completion_tokens} of answer")
