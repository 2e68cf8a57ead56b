package stages

import (
	"encoding/json"
	"maps"

	"agentctl/relay/kernel"
	"agentctl/strictjson"
)

// Keys in the _meta of requests and results.
const (
	MetaSignature = "agentctl/sig"      // Signature, of a request or of a result
	MetaNonce     = "agentctl/nonce"    // in a request: a string of at most 256 bytes that the signatures cover
	MetaAccept    = "agentctl/accept"   // in a request: "gzip", or an Accept-Encoding header with it, asks for a packed result
	MetaEncoding  = "agentctl/encoding" // in a result: "gzip" says that it is packed
)

// member finds a member of a _meta object; nil when there is none.
func member(meta json.RawMessage, key string) json.RawMessage {
	if len(meta) == 0 {
		return nil
	}
	var m map[string]strictjson.Raw
	if strictjson.Unmarshal(meta, &m) != nil {
		return nil
	}
	return json.RawMessage(m[key])
}

// text is a string member of a _meta object, at most 256 bytes; "" when there is none.
func text(meta json.RawMessage, key string) string {
	var s string
	if raw := member(meta, key); raw == nil || strictjson.Unmarshal(raw, &s) != nil || len(s) > 256 {
		return ""
	}
	return s
}

// withMeta is a copy of a result with one more member in its _meta. A plugin may give
// one *Result to several callers, so it is never changed in place.
func withMeta(res *kernel.Result, key string, value any) *kernel.Result {
	var old map[string]strictjson.Raw
	_ = strictjson.Unmarshal(res.Meta, &old) // a _meta that is no object has no members
	m := make(map[string]strictjson.Raw, len(old)+1)
	maps.Copy(m, old)
	m[key] = strictjson.Raw(encode(value))
	out := *res
	out.Meta = encode(m)
	return &out
}
