"""Training steps beside transformers and peft: distillation and QLoRA."""
