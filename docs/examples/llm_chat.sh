#!/bin/sh
# One question from the shell with nothing to configure; -s is the system prompt, -o sets any field.  pip install llm
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 sh llm_chat.sh
llm openai endpoint "$OPENAI_BASE_URL" -m smol-135m -o temperature 0 -o max_tokens 32 \
  -s 'Answer in one sentence.' 'What is the capital of France?'
