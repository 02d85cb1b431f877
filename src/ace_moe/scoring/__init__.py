"""Windows of text in; KL, agreement, perplexity and their intervals out."""
