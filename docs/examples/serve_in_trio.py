# The server as part of a trio program: ready when the block is entered, gone when it is left.  pip install openai
# python serve_in_trio.py path/to/model.gguf
import sys

import trio
from openai import AsyncOpenAI

from tlserve import ServeConfig, serve


async def ask(client: AsyncOpenAI, model: str, question: str) -> None:
    completion = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=16, temperature=0
    )
    print(completion.choices[0].message.content)


async def main() -> None:
    config = ServeConfig.for_model(sys.argv[1])
    async with (
        serve(config) as server,
        AsyncOpenAI(base_url=server.base_url, api_key="none") as client,
        trio.open_nursery() as nursery,
    ):
        for question in ("Name a colour.", "Name an animal."):
            nursery.start_soon(ask, client, config.model_id, question)


trio.run(main)
