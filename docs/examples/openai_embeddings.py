# Which text says nearly the same?  pip install openai
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python openai_embeddings.py
from openai import OpenAI

TEXTS = ["Interest rates rose again.", "A kitten is sleeping on the couch.", "The train leaves at nine."]
SENTENCE = "A cat sleeps on the sofa."

client = OpenAI()
reply = client.embeddings.create(model="smol-135m", input=[SENTENCE, *TEXTS])
sentence, *texts = (item.embedding for item in reply.data)


def cosine_similarity(a: list[float], b: list[float]) -> float:
    """Vectors of this server have length 1, so that the product is the cosine."""
    return sum(x * y for x, y in zip(a, b, strict=True))


found = [(cosine_similarity(sentence, vector), text) for vector, text in zip(texts, TEXTS, strict=True)]
for similarity, text in sorted(found, reverse=True):
    print(f"{similarity:.4f} {text}")
