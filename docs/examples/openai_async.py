# Several questions at once from asyncio: the server computes them in one batch.  pip install openai
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python openai_async.py
import asyncio

from openai import AsyncOpenAI

QUESTIONS = ["Name a colour.", "Name an animal.", "Name a city."]


async def ask(client: AsyncOpenAI, question: str) -> str:
    completion = await client.chat.completions.create(
        model="smol-135m", messages=[{"role": "user", "content": question}], max_tokens=16, temperature=0
    )
    return completion.choices[0].message.content or ""


async def main() -> None:
    async with AsyncOpenAI() as client:
        for answer in await asyncio.gather(*(ask(client, question) for question in QUESTIONS)):
            print(answer)


asyncio.run(main())
