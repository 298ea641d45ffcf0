// Which text says nearly the same?  npm install openai
// OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none node openai_embeddings.mjs
import OpenAI from "openai";

const TEXTS = ["Interest rates rose again.", "A kitten is sleeping on the couch.", "The train leaves at nine."];

const client = new OpenAI();
const reply = await client.embeddings.create({ model: "smol-135m", input: ["A cat sleeps on the sofa.", ...TEXTS] });
const [sentence, ...texts] = reply.data.map((item) => item.embedding);

// Vectors of this server have length 1, so that the product is the cosine.
const cosineSimilarity = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);

const found = texts.map((vector, i) => ({ similarity: cosineSimilarity(sentence, vector), text: TEXTS[i] }));
found.sort((a, b) => b.similarity - a.similarity);
for (const { similarity, text } of found) console.log(similarity.toFixed(4), text);
