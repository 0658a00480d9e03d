"""What a model writes, taken apart: content, thoughts, and tool calls in the format of its family."""
