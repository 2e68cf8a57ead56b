package auth

// migrations hold the schema: entry i takes user_version i to i+1. Do not change an entry that was
// released: there are databases, and backups, of each version. Two processes may
// have the database open, so every write is one IMMEDIATE transaction, and `changes`
// shows the other process which table to read again (Refresh):
//
//	tokens       what was minted: jti and claims, never a token
//	revocations  the deny list; a row by subject, node or tenant stops the tokens issued
//	             up to `at`, so that a new one can be minted
//	nodes, seen  the node registry; last-seen times are in a separate table, as they are written
//	             each minute
//	attributes   what operators set on nodes: a row for each node that has anything; in a separate
//	             table, as a row of nodes is large
//	served       the boot and the clone mark of a node's links
//	removed      nodes that an operator removed, so that a link which is still open, or another
//	             process, does not register them again; a new token does
//	invites      codes that boards and agents join with, as hashes
//	enrollments  the keys of boards and agents that have joined
//	consents     what operators allow plugins to use of the relay
//	keys         the signing keys: which one signs, and which still verify
//	changes      counters that move with revocations, nodes (not with seen) and keys; epoch
//	             moves with everything that takes rights away
//	relay        one row: a copy of relay.json
var migrations = []string{
	`CREATE TABLE tokens (
		jti    TEXT PRIMARY KEY,
		class  TEXT NOT NULL,
		tenant TEXT NOT NULL,
		sub    TEXT NOT NULL,
		node   TEXT NOT NULL,
		scopes TEXT NOT NULL,
		iat    INTEGER NOT NULL,
		exp    INTEGER NOT NULL
	) STRICT, WITHOUT ROWID;
	CREATE INDEX tokens_sub ON tokens (sub);
	CREATE INDEX tokens_node ON tokens (node) WHERE node <> '';
	CREATE INDEX tokens_tenant ON tokens (tenant);
	CREATE INDEX tokens_exp ON tokens (exp);
	CREATE TABLE revocations (
		kind  TEXT NOT NULL CHECK (kind IN ('jti', 'sub', 'node', 'tenant')),
		value TEXT NOT NULL,
		at    INTEGER NOT NULL,
		until INTEGER NOT NULL,
		PRIMARY KEY (kind, value)
	) STRICT, WITHOUT ROWID;
	CREATE TABLE nodes (
		id         INTEGER PRIMARY KEY,
		node_id    TEXT NOT NULL UNIQUE,
		tenant     TEXT NOT NULL,
		name       TEXT NOT NULL,
		want       TEXT NOT NULL,
		manifest   TEXT NOT NULL,
		sum        BLOB NOT NULL,
		created_ms INTEGER NOT NULL,
		change     INTEGER NOT NULL,
		UNIQUE (tenant, name)
	) STRICT;
	CREATE INDEX nodes_change ON nodes (change);
	CREATE TABLE seen (
		id INTEGER PRIMARY KEY,
		ms INTEGER NOT NULL
	) STRICT;
	CREATE TABLE changes (
		id          INTEGER PRIMARY KEY CHECK (id = 1),
		revocations INTEGER NOT NULL,
		nodes       INTEGER NOT NULL
	) STRICT;
	INSERT INTO changes VALUES (1, 0, 0);`,
	`CREATE TABLE attributes (
		id          INTEGER PRIMARY KEY,
		name_set    INTEGER NOT NULL,
		tags        TEXT NOT NULL,
		description TEXT NOT NULL
	) STRICT;`,
	`CREATE TABLE removed (
		node_id TEXT PRIMARY KEY,
		change  INTEGER NOT NULL
	) STRICT, WITHOUT ROWID;
	CREATE INDEX removed_change ON removed (change);`,
	joinSchema,
	`CREATE TABLE served (
		id       INTEGER PRIMARY KEY,
		boot_id  TEXT NOT NULL,
		clone_ms INTEGER NOT NULL
	) STRICT;`,
	keysSchema,
	recordSchema,
	// Pages of a tenant's nodes, and prefixes of an id: without it each page sorts all of them.
	"CREATE INDEX nodes_tenant ON nodes (tenant, node_id);",
	// The topics that the scopes for events are limited to (topicsText).
	`ALTER TABLE tokens ADD COLUMN topics TEXT NOT NULL DEFAULT '';
	ALTER TABLE invites ADD COLUMN topics TEXT NOT NULL DEFAULT '';
	ALTER TABLE enrollments ADD COLUMN topics TEXT NOT NULL DEFAULT '';`,
	consentSchema,
}

// joinSchema holds what joining needs. An invite is kept after its end for a while, so that a
// late board learns why it is refused. An enrollment is a key and its rights: the
// row decides what a refresh may get (RenewToken). Codes are stored as their SHA-256.
const joinSchema = `
	CREATE TABLE invites (
		id          INTEGER PRIMARY KEY,
		code        TEXT NOT NULL UNIQUE,
		prefix      TEXT NOT NULL UNIQUE,
		class       TEXT NOT NULL,
		tenant      TEXT NOT NULL,
		name        TEXT NOT NULL,
		tags        TEXT NOT NULL,
		scopes      TEXT NOT NULL,
		uses        INTEGER NOT NULL,
		used        INTEGER NOT NULL,
		creator     TEXT NOT NULL,
		creator_jti TEXT NOT NULL,
		created     INTEGER NOT NULL,
		expires     INTEGER NOT NULL,
		revoked     INTEGER NOT NULL
	) STRICT;
	CREATE INDEX invites_tenant ON invites (tenant);
	CREATE TABLE enrollments (
		id         INTEGER PRIMARY KEY,
		jkt        TEXT NOT NULL UNIQUE,
		public_key BLOB NOT NULL,
		code       TEXT NOT NULL,
		class      TEXT NOT NULL,
		tenant     TEXT NOT NULL,
		sub        TEXT NOT NULL,
		scopes     TEXT NOT NULL,
		instance   TEXT NOT NULL,
		created    INTEGER NOT NULL,
		jti        TEXT NOT NULL,
		gen        INTEGER NOT NULL,
		base_gen   INTEGER NOT NULL,
		request_id TEXT NOT NULL,
		nonce      TEXT NOT NULL,
		used_gen   INTEGER NOT NULL,
		prev_spent INTEGER NOT NULL,
		migrating  INTEGER NOT NULL,
		revoked    INTEGER NOT NULL,
		code_revoked INTEGER NOT NULL
	) STRICT;
	CREATE INDEX enrollments_code ON enrollments (code);
	CREATE INDEX enrollments_sub ON enrollments (sub);
	CREATE INDEX enrollments_jti ON enrollments (jti);
	CREATE INDEX enrollments_migrating ON enrollments (sub) WHERE migrating;`

// keysSchema records which files in keys/ are keys of this relay, see keyring.go. until is 0
// for the one that signs.
const keysSchema = `
	CREATE TABLE keys (
		kid     TEXT PRIMARY KEY,
		public  BLOB NOT NULL,
		created INTEGER NOT NULL,
		until   INTEGER NOT NULL
	) STRICT, WITHOUT ROWID;
	CREATE UNIQUE INDEX keys_signing ON keys (until) WHERE until = 0;
	ALTER TABLE changes ADD COLUMN keys INTEGER NOT NULL DEFAULT 0;`

// recordSchema holds the copy of relay.json (relay_info.go). Triggers count the epoch, so that no
// statement that takes rights away can forget to.
const recordSchema = `
	CREATE TABLE relay (
		id         INTEGER PRIMARY KEY CHECK (id = 1),
		db_id      TEXT NOT NULL,
		relay_id   TEXT NOT NULL,
		audience   TEXT NOT NULL,
		created    INTEGER NOT NULL,
		events_id  TEXT NOT NULL,
		events_seq INTEGER NOT NULL
	) STRICT;
	ALTER TABLE changes ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;
	CREATE TRIGGER epoch_changes AFTER UPDATE OF revocations, keys ON changes
	BEGIN UPDATE changes SET epoch = epoch + 1; END;
	CREATE TRIGGER epoch_invites AFTER UPDATE OF used, revoked ON invites
	BEGIN UPDATE changes SET epoch = epoch + 1; END;
	CREATE TRIGGER epoch_enrollments AFTER UPDATE OF revoked, code_revoked ON enrollments
	BEGIN UPDATE changes SET epoch = epoch + 1; END;`

// consentSchema holds what operators decided on plugins (consent.go). The epoch moves with a changed
// decision, which may take rights away.
const consentSchema = `
	CREATE TABLE consents (
		plugin  TEXT PRIMARY KEY,
		digest  TEXT NOT NULL,
		tenants TEXT NOT NULL,
		actor   TEXT NOT NULL,
		at      INTEGER NOT NULL
	) STRICT, WITHOUT ROWID;
	CREATE TRIGGER epoch_consents AFTER UPDATE ON consents
	BEGIN UPDATE changes SET epoch = epoch + 1; END;`
