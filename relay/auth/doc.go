// Package auth knows who is asking: relay identity, signing keys, tokens, scopes,
// revocation and the registry of nodes, all in one state directory.
//
// Open a Store, Run it, and ask it:
//
//	store, err := auth.Open(auth.Options{StateDir: dir})
//	go store.Run(ctx)                                   // revocations made elsewhere, last-seen
//	id, err := store.Verify(bearer, auth.ClassAgent)    // who is it
//	if !id.Has(manifest.ScopeCallReadOnly) { ... }      // what may it do
//	err = store.Active(id)                              // is that still so (each second, on streams)
//
// A token is an Ed25519 JWT (docs/protocol.md, "Tokens"):
//
//	header  {"alg":"EdDSA","typ":"at+jwt","kid":K}         K is looked up in a local table
//	claims  iss aud sub tid cls scope jti iat nbf exp      gen and iid on device tokens
//	bounds  4 KiB, two dots, base64url; 60 s of leeway; at most MaxTTL of life
//
// Files, made 0600 (directories 0700); what root makes in a directory that belongs to
// someone else is given to that owner, so that a service can read what `sudo agentctl
// token create` left behind:
//
//	STATE/relay.json      relay id, audience, issuer
//	STATE/keys/<kid>.pem  signing keys; the greatest kid signs, all of them verify
//	STATE/relay.db        minted tokens (never the tokens themselves), revocations, nodes
//
// Two processes may hold one state directory: `agentctl token revoke` acts on a relay
// that is running, within one poll (PollInterval).
package auth
