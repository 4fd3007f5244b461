//! Kill points.
