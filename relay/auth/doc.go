// Package auth authenticates callers: relay identity, signing keys, tokens, scopes,
// revocation and the registry of nodes, all in one state directory.
//
//	store, err := auth.Open(auth.Options{StateDir: dir})
//	go store.Run(ctx)                                   // follow other processes, save last-seen times
//	id, err := store.Verify(bearer, auth.ClassAgent)    // authenticate a request
//	if !id.Has(manifest.ScopeCallReadOnly) { ... }      // authorize it
//	err = store.Active(id)                              // re-check a long-lived stream each second
//
// # Life of a token
//
// A token is an Ed25519 JWT (docs/protocol.md, "Tokens"). It passes through four stages:
//
//	Mint    checks the request, records jti and claims in relay.db, then signs
//	Verify  checks form, signature and claims once, and caches the identity under the
//	        SHA-256 of the token; a cache hit skips to the last check
//	Active  compares the cached identity with the clock and the deny list; Verify
//	        calls it on every request, streams and device links call it each second
//	Revoke  adds a row to the deny list; this process applies it at once, other
//	        processes on the same directory within PollInterval
//
// A token of Mint cannot be refreshed: a holder gets a new one from Mint before the old one
// expires.
//
// # Joining
//
// Boards and agents that join hold a key, and get tokens that are bound to it:
//
//	CreateInvite     makes a code; the database has its hash
//	Enroll           exchanges a code and a public key for an identity and its first token
//	RenewToken       exchanges a proof of the key for the next token (refreshState)
//	VerifyLinkProof  checks that whoever presents such a token on a link holds the key
//
// What joined is stopped as tokens are: the key counts as issued when it joined, so every
// revocation of its node, subject or tenant since then stops it.
//
// # Claims and bounds
//
//	header  {"alg":"EdDSA","typ":"at+jwt","kid":K}   K is looked up in the keyring
//	iss aud   this relay's issuer and audience (relay.json), compared exactly
//	sub tid   the agent or node id, and its tenant
//	cls       the class: agent_runtime, device_runtime or enroll
//	scope     the scopes, separated by spaces
//	jti       the token's ULID: the key of `token ls` and of a revocation by token
//	iat nbf exp   Unix seconds; 60 s of leeway, at most MaxTTL between iat and exp
//	gen iid   device tokens: generation, and hash of the instance the token is bound to
//	cnf       thumbprint of the key the token is bound to; tokens of Enroll and RenewToken
//
// A token has at most 4 KiB and the base64url characters of three parts. Unknown
// headers and claims are refused (see claims).
//
// # Files
//
// Files have mode 0600 and directories 0700. When root writes into a directory that
// another user owns, the file is given to that user, so that a service can read what
// `sudo agentctl token create` made:
//
//	STATE/relay.json      relay id, audience, issuer
//	STATE/keys/<kid>.pem  signing keys; relay.db records which files are keys, which of them
//	                      signs and until when the others verify (keyring.go)
//	STATE/relay.db        minted tokens (never the tokens themselves), revocations, nodes, invites,
//	                      keys that joined, signing keys
//
// # Interruptions
//
// A change of relay.db is one transaction, which is durable before its caller gets a result without an
// error (synchronous=FULL), and a file is replaced by a rename (stateDir.replace). Where both change, they
// do so in this order, and a process that ends in between does no harm:
//
//	first start   tables and relay id, signing key, relay.json (Store.setUp)
//	rotation      file of the new key, rows, files of the keys that were dropped (RotateKeys)
//	revocation    relay.db, then relay.json and its copy (record.go)
//	restore       restore.json, then renames that can be repeated (stateDir.finishSwap)
//
// # Bounds of the tables
//
// A full table refuses new rows with ErrFull, except as noted.
//
//	tokens        500,000   a row is deleted 30 days after its token expired
//	revocations   100,000   from half of that on, rows that can only stop expired tokens are deleted
//	nodes         100,000   rows are not deleted automatically
//	removed       100,000   the oldest rows are deleted
//	invites        20,000   and 1,000 of one tenant; a row is deleted 30 days after its expiry or
//	                        revocation, or when it has ended and the tenant has 1,000
//	enrollments   200,000   when it is full, rows of revoked and replaced keys are deleted
//	consents        1,024   ErrRequest; rows are not deleted automatically
//	keys               16   a row is deleted by the first rotation that is 30 days after its end
//
// # Source files
//
//	opening a directory      store, statedir, statedir_lock (locks, exchange of files), file_owner
//	relay.json               relay_info (its values, and their copy in relay.db), record (whether the
//	                         stores are those that it names), endpoint
//	the database             database (connections, group commit), schema
//	signing keys             keyring, rotate
//	the relay's own CA       authority
//	tokens                   scope, grant (what a token may get), claims, identity, mint, token_list,
//	                         verify, token_cache, revoke
//	invites and joining      invite, enroll, board_migration (boards that had a token), renew, nonce
//	the node registry        node_registry (in memory), node_register (connecting), node_query
//	                         (lists and lookups), node_attributes, node_remove, node_seen,
//	                         node_served (boots and clone marks)
//	plugins                  consent (what operators allow them)
//	backups                  copy (reading and completing a copy of a state directory)
//
// # Concurrency
//
// Verify, Active and NodeTenant read memory only. Writes after Open go through one group
// commit (database.write). Store.flushMu and Store.keysMu are taken first; the locks of the
// cache, the registry, joining and the database's queue are leaves. The deny list and the
// keyring are swapped atomically.
package auth
