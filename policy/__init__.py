"""What makes the trainer exact and fast: LoRA layers, packing, attention, the chunked head."""
