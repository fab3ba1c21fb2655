"""Prompts, their order and their tokenizer."""

from r3train.data.order import PromptOrder
from r3train.data.prompts import load_prompts
from r3train.data.tokenizer import load_tokenizer

__all__ = ["PromptOrder", "load_prompts", "load_tokenizer"]
