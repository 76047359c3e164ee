"""What makes N vLLM servers one: which of them holds a prompt's prefix, and what their answers mean. Pure functions."""
