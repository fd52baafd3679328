// What words of the pages mean, where they stand: sentences of docs/glossary.md.

import { facts, h } from "./elements.js";

const WORDS = {
  "bits per byte": "How many bits the model needs for one byte of text: less is better.",
  fidelity: "How well the records of a cache agree with the live teacher, at some positions.",
  gold: "The token that really follows in the text.",
  head: "The tokens of a record that are probable enough to be stored by themselves.",
  "held out": "Text on which the student is measured and never trained.",
  "kept mass": "The share of the teacher's probability that the entries of a record stand for.",
  KL: "Kullback-Leibler divergence: how far the student's probabilities are from the teacher's, in nats per token.",
  nats: "The unit of a loss with natural logarithms. One nat is 1.44 bits.",
  parity: "The fused loss and a plain dense loss give the same value and the same gradient: a check at the start of a job.",
  perplexity: "Compare it only between models of one text and one vocabulary.",
  seal: "The digest of a finished shard.",
  tail: "The tokens of a record that are too rare to be stored by themselves.",
  z: "An error, divided by the error that chance explains. Below 8.5 the records of a cache pass as faithful.",
};

/** Make a part that explains these words; it is closed until somebody asks. */
export const wordsOf = (...words) => h("details", {}, h("summary", {}, "What the words mean"),
  facts(words.map((word) => [word, WORDS[word]])));
