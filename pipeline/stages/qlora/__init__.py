"""An adapter on a quantized base."""
