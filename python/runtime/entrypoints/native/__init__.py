"""SGLang's native endpoints."""
