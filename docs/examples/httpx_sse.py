# A stream without a client library: the events are lines that begin with "data: ".  pip install httpx
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python httpx_sse.py
import json
import os

import httpx

request = {
    "model": "smol-135m",
    "messages": [{"role": "user", "content": "Name three colours."}],
    "max_tokens": 32,
    "temperature": 0,
    "stream": True,
}
url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
with httpx.stream("POST", url, json=request, timeout=60) as response:
    if response.is_error:
        raise SystemExit(json.loads(response.read())["error"]["message"])
    for line in response.iter_lines():
        if not line.startswith("data: "):  # the empty line after an event, or a comment that keeps the connection open
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            raise SystemExit(event["error"]["message"])
        print(event["choices"][0]["delta"].get("content", ""), end="", flush=True)
print()
