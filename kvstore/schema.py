"""The index's tables. Counts that eviction and `stats` need are kept by triggers: the database's
work, not the code's, so that no path through the code can forget them.

blocks     one row a block, and one a state checkpoint (`state` is 1). `used`: the request counter when it was last the deepest block of a
           request; `hits`: how often it was (both pass to the parent when the block goes).
           `children`, `holds`: rows that stand on it. `chain_bytes`: of it and all before it.
           `length`: how many tokens; of a sealed file `tokens` is empty, and its root's identity.
           `signer`: who signed the file, as its header says; whoever reads it finds out.
           `reachable` is 1 where the block and all before it are there; `lost` holds the reason
           where a block's file was set aside or found missing while its row is still needed.
roots      `tenant`: the id of whose sealed blocks they are; of others it follows from the identity.
totals     blocks and bytes by root and codec, of files that are there. `chain_bytes`: the sum over
           leaves, which is what their chains would take if none shared a block.
holds      pins and leases: the block that one stands on, and so all before it, stay.
unfinished reserved bytes of files that are being written, or were when their writer died.
sessions   what `ls` shows of each session file, as long as the file's stamp is the same.
"""

from __future__ import annotations

INDEX_VERSION = 8
TABLES = ("sessions", "unfinished", "holds", "blocks", "totals", "roots", "counters")
"""In an order in which they can be dropped."""

SCHEMA = """
CREATE TABLE roots(
  id INTEGER PRIMARY KEY, root_id TEXT NOT NULL UNIQUE, identity TEXT NOT NULL,
  tenant TEXT NOT NULL DEFAULT '');
CREATE TABLE blocks(
  id INTEGER PRIMARY KEY,
  name BLOB NOT NULL UNIQUE,
  parent INTEGER REFERENCES blocks(id) ON DELETE RESTRICT,
  root INTEGER NOT NULL REFERENCES roots(id),
  start INTEGER NOT NULL,
  tokens BLOB NOT NULL,
  length INTEGER NOT NULL,
  sealed INTEGER NOT NULL DEFAULT 0,
  state INTEGER NOT NULL DEFAULT 0,
  bytes INTEGER NOT NULL,
  codec TEXT NOT NULL,
  signer TEXT NOT NULL DEFAULT '',
  used INTEGER NOT NULL,
  hits INTEGER NOT NULL DEFAULT 0,
  children INTEGER NOT NULL DEFAULT 0,
  holds INTEGER NOT NULL DEFAULT 0,
  chain_bytes INTEGER NOT NULL DEFAULT 0,
  synced INTEGER NOT NULL DEFAULT 0,
  reachable INTEGER NOT NULL,
  lost TEXT);
CREATE TABLE totals(
  root INTEGER NOT NULL, codec TEXT NOT NULL,
  blocks INTEGER NOT NULL, bytes INTEGER NOT NULL, PRIMARY KEY(root, codec));
CREATE TABLE holds(
  id INTEGER PRIMARY KEY,
  kind TEXT NOT NULL,
  owner TEXT NOT NULL,
  until REAL NOT NULL,
  block INTEGER REFERENCES blocks(id) ON DELETE RESTRICT);
CREATE TABLE unfinished(path TEXT PRIMARY KEY, owner TEXT NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE sessions(
  path TEXT PRIMARY KEY, stamp TEXT NOT NULL, bytes INTEGER NOT NULL, saved INTEGER NOT NULL,
  facts TEXT NOT NULL);
CREATE TABLE counters(name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT INTO counters VALUES ('clock', 0), ('requests', 0), ('reused_tokens', 0),
  ('computed_tokens', 0), ('evicted_blocks', 0), ('session_bytes', 0), ('leaf_chain_bytes', 0)
"""

RULES = """
CREATE INDEX children ON blocks(parent, root, tokens);
CREATE INDEX leaves ON blocks(used, id) WHERE children = 0 AND holds = 0;
CREATE INDEX states ON blocks(parent, root, length) WHERE state = 1;
CREATE INDEX lost ON blocks(id) WHERE lost IS NOT NULL;
CREATE INDEX unreachable ON blocks(start) WHERE reachable = 0 AND lost IS NULL;
CREATE INDEX held ON holds(block);
CREATE INDEX holders ON holds(kind, owner);
CREATE INDEX expiring ON holds(until);
CREATE TRIGGER block_stored AFTER INSERT ON blocks BEGIN
  UPDATE blocks SET children = children + 1 WHERE id = NEW.parent;
  UPDATE blocks SET chain_bytes = NEW.bytes
    + COALESCE((SELECT chain_bytes FROM blocks WHERE id = NEW.parent), 0) WHERE id = NEW.id;
  UPDATE counters SET value = value + (SELECT chain_bytes FROM blocks WHERE id = NEW.id)
    WHERE name = 'leaf_chain_bytes';
END;
CREATE TRIGGER block_counted AFTER INSERT ON blocks WHEN NEW.lost IS NULL BEGIN
  UPDATE totals SET blocks = blocks + 1, bytes = bytes + NEW.bytes
    WHERE root = NEW.root AND codec = NEW.codec;
END;
CREATE TRIGGER block_gone AFTER DELETE ON blocks BEGIN
  UPDATE blocks SET children = children - 1, used = MAX(used, OLD.used), hits = hits + OLD.hits
    WHERE id = OLD.parent;
  UPDATE counters SET value = value - OLD.chain_bytes WHERE name = 'leaf_chain_bytes';
END;
CREATE TRIGGER block_uncounted AFTER DELETE ON blocks WHEN OLD.lost IS NULL BEGIN
  UPDATE totals SET blocks = blocks - 1, bytes = bytes - OLD.bytes
    WHERE root = OLD.root AND codec = OLD.codec;
END;
CREATE TRIGGER block_moved AFTER UPDATE OF parent ON blocks WHEN OLD.parent IS NOT NEW.parent BEGIN
  UPDATE blocks SET children = children - 1 WHERE id = OLD.parent;
  UPDATE blocks SET children = children + 1 WHERE id = NEW.parent;
END;
CREATE TRIGGER block_changed AFTER UPDATE OF root, bytes, codec, lost ON blocks BEGIN
  UPDATE totals SET blocks = blocks - 1, bytes = bytes - OLD.bytes
    WHERE OLD.lost IS NULL AND root = OLD.root AND codec = OLD.codec;
  UPDATE totals SET blocks = blocks + 1, bytes = bytes + NEW.bytes
    WHERE NEW.lost IS NULL AND root = NEW.root AND codec = NEW.codec;
END;
CREATE TRIGGER leaf_no_more AFTER UPDATE OF children ON blocks
  WHEN OLD.children = 0 AND NEW.children > 0 BEGIN
  UPDATE counters SET value = value - NEW.chain_bytes WHERE name = 'leaf_chain_bytes';
END;
CREATE TRIGGER leaf_again AFTER UPDATE OF children ON blocks
  WHEN OLD.children > 0 AND NEW.children = 0 BEGIN
  UPDATE counters SET value = value + NEW.chain_bytes WHERE name = 'leaf_chain_bytes';
END;
CREATE TRIGGER hold_taken AFTER INSERT ON holds BEGIN
  UPDATE blocks SET holds = holds + 1 WHERE id = NEW.block;
END;
CREATE TRIGGER hold_ended AFTER DELETE ON holds BEGIN
  UPDATE blocks SET holds = holds - 1 WHERE id = OLD.block;
END;
CREATE TRIGGER hold_moved AFTER UPDATE OF block ON holds BEGIN
  UPDATE blocks SET holds = holds - 1 WHERE id = OLD.block;
  UPDATE blocks SET holds = holds + 1 WHERE id = NEW.block;
END;
CREATE TRIGGER session_stored AFTER INSERT ON sessions BEGIN
  UPDATE counters SET value = value + NEW.bytes WHERE name = 'session_bytes';
END;
CREATE TRIGGER session_changed AFTER UPDATE OF bytes ON sessions BEGIN
  UPDATE counters SET value = value + NEW.bytes - OLD.bytes WHERE name = 'session_bytes';
END;
CREATE TRIGGER session_gone AFTER DELETE ON sessions BEGIN
  UPDATE counters SET value = value - OLD.bytes WHERE name = 'session_bytes';
END
"""
"""Made after a rebuild has filled the tables: a million rows go in without them, and the counts
are set in one statement each (what depends on the tree: in rebuild.py)."""

COUNT_ALL = """
INSERT INTO totals SELECT root, codec, COUNT(*), SUM(bytes) FROM blocks WHERE lost IS NULL
  GROUP BY root, codec;
UPDATE counters SET value = (SELECT COALESCE(SUM(chain_bytes), 0) FROM blocks WHERE children = 0)
  WHERE name = 'leaf_chain_bytes';
UPDATE counters SET value = (SELECT COALESCE(SUM(bytes), 0) FROM sessions)
  WHERE name = 'session_bytes';
UPDATE blocks SET holds = counted.number FROM
  (SELECT block, COUNT(*) AS number FROM holds WHERE block IS NOT NULL GROUP BY block) AS counted
  WHERE blocks.id = counted.block
"""
