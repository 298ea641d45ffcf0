// Which text is nearest to a question?  npm install openai
// OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none node openai_embeddings.mjs
import OpenAI from "openai";

const TEXTS = ["The cat sleeps on the sofa.", "Interest rates rose again.", "A dog runs through the park."];

const client = new OpenAI();
const reply = await client.embeddings.create({ model: "smol-135m", input: ["Where is the kitten?", ...TEXTS] });
const [question, ...texts] = reply.data.map((item) => item.embedding);

// Vectors of this server have length 1, so that the product is the cosine.
const cosineSimilarity = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);

const found = texts.map((vector, i) => ({ similarity: cosineSimilarity(question, vector), text: TEXTS[i] }));
found.sort((a, b) => b.similarity - a.similarity);
for (const { similarity, text } of found) console.log(similarity.toFixed(4), text);
