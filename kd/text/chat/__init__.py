"""Chats: their messages, how a template renders them, and what of that is learned."""
