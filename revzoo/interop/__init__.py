"""Files of other programs: published weights in, exports out."""
