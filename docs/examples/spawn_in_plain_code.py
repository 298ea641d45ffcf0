# The server inside a plain program or test: equal questions get equal answers.  pip install openai
# python spawn_in_plain_code.py path/to/model.gguf
import sys

from openai import OpenAI

from tlserve import ServeConfig, spawn

config = ServeConfig.for_model(sys.argv[1])
with spawn(config) as server, OpenAI(base_url=server.base_url, api_key="none") as client:
    answers = [
        client.chat.completions.create(
            model=config.model_id, messages=[{"role": "user", "content": "Name a colour."}], max_tokens=16, seed=7
        )
        for _ in range(2)
    ]
    texts = [answer.choices[0].message.content for answer in answers]
    print(texts[0])
    assert texts[0] == texts[1]
