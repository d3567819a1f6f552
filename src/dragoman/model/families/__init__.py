"""Families: whole models beside the paper's, each answering `contracts.Decodable`."""
