"""Other protocols as thin translations: each request becomes a chat request, each chunk of its answer their events."""
