#!/bin/sh
# An answer as it is written, event by event; curl's -N shows each as it comes.
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 sh curl_stream.sh
curl -fsSN "$OPENAI_BASE_URL/chat/completions" -d '{
  "model": "smol-135m",
  "messages": [{"role": "user", "content": "Name three colours."}],
  "max_tokens": 32,
  "temperature": 0,
  "stream": true
}'
