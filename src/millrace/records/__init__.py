"""Record batches: headers, validation, stamping, records, compression. Pure bytes: no files, no clock, no asyncio."""
