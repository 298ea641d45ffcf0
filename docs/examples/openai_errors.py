# What is refused, and how: the exception, its field and its code.  pip install openai
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python openai_errors.py
import openai

# A full server answers 429 with Retry-After, which the client waits for; after so many tries it is a RateLimitError.
client = openai.OpenAI(max_retries=5)


def ask(model: str = "smol-135m", max_tokens: int = 16, temperature: float = 0, n: int = 1) -> None:
    client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=max_tokens,
        temperature=temperature,
        n=n,
    )


try:
    ask(temperature=3)
except openai.BadRequestError as error:
    print(error.status_code, error.param, error.message)
try:
    ask(max_tokens=1_000_000)
except openai.BadRequestError as error:
    print(error.status_code, error.param, error.code)
try:
    ask(model="gpt-4o")
except openai.NotFoundError as error:
    print(error.status_code, error.param, error.code)
try:
    ask(n=2)
except openai.UnprocessableEntityError as error:
    print(error.status_code, error.param, error.code)
