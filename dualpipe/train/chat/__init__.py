"""Conversations: their forms in records, chat templates, and the assistant's turns in the rendered text."""
