# Leaving an answer in the middle: closing the stream frees what it held on the server.  pip install openai
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python openai_cancel.py
from openai import OpenAI

client = OpenAI()
text = ""
with client.chat.completions.create(
    model="smol-135m", messages=[{"role": "user", "content": "Tell me a story."}], temperature=0, stream=True
) as stream:
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if len(text) >= 20:
            break
print(text)
