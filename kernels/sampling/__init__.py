"""From logits to tokens: penalties, truncation, random draws, verification of drafts."""
