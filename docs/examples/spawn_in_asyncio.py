# The server beside an asyncio program, on a thread of its own.  pip install openai
# python spawn_in_asyncio.py path/to/model.gguf
import asyncio
import sys

from openai import AsyncOpenAI

from tlserve import ServeConfig, spawn


async def main() -> None:
    config = ServeConfig.for_model(sys.argv[1])
    server = await asyncio.to_thread(spawn, config)  # loading a model takes a moment
    async with AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
        stream = await client.chat.completions.create(
            model=config.model_id,
            messages=[{"role": "user", "content": "Name three colours."}],
            max_tokens=16,
            temperature=0,
            stream=True,
        )
        async for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
    server.drain()
    await asyncio.to_thread(server.join)


asyncio.run(main())
