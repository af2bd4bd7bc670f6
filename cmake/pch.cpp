// Carries the precompiled header that every room with torch reuses.
