# Which text is nearest to a question?  pip install openai
# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python openai_embeddings.py
from openai import OpenAI

TEXTS = ["The cat sleeps on the sofa.", "Interest rates rose again.", "A dog runs through the park."]
QUESTION = "Where is the kitten?"

client = OpenAI()
reply = client.embeddings.create(model="smol-135m", input=[QUESTION, *TEXTS])
question, *texts = (item.embedding for item in reply.data)


def cosine_similarity(a: list[float], b: list[float]) -> float:
    """Vectors of this server have length 1, so that the product is the cosine."""
    return sum(x * y for x, y in zip(a, b, strict=True))


found = [(cosine_similarity(question, vector), text) for vector, text in zip(texts, TEXTS, strict=True)]
for similarity, text in sorted(found, reverse=True):
    print(f"{similarity:.4f} {text}")
