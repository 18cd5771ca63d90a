"""Measures whole models on a CPU: tokens per second of prompts and of answers, beside llama.cpp and dense bfloat16."""
