# An answer as it is written, and its cost at the end.  pip install 'pydantic-ai-slim[openai]'
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python pydantic_ai_stream.py
import asyncio

from pydantic_ai import Agent, ModelSettings

agent = Agent("openai-chat:smol-135m", model_settings=ModelSettings(max_tokens=32, temperature=0))


async def main() -> None:
    async with agent.run_stream("Name three colours.") as result:
        async for text in result.stream_text(delta=True):
            print(text, end="", flush=True)
    print(f"\n{result.usage.input_tokens} tokens of prompt, {result.usage.output_tokens} of answer")


asyncio.run(main())
