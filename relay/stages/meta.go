package stages

import (
	"encoding/json"

	"agentctl/relay/kernel"
	"agentctl/strictjson"
)

// Keys in the _meta of requests and results.
const (
	// MetaSignature holds a Signature, of a request or of a result.
	MetaSignature = "agentctl/sig"
	// MetaNonce of a request is a string of at most 256 bytes that the signatures of the
	// request and of its result cover.
	MetaNonce = "agentctl/nonce"
	// MetaAccept of a request asks for a packed result: "gzip", or an Accept-Encoding
	// header with it.
	MetaAccept = "agentctl/accept"
	// MetaEncoding of a result names the encoding of a packed one: "gzip".
	MetaEncoding = "agentctl/encoding"
)

// metaMember returns a member of a _meta object; nil when there is none. A _meta that is not strict
// JSON, with a name given twice say, has no members: a stage must not act on one of two values.
func metaMember(meta json.RawMessage, key string) json.RawMessage {
	if len(meta) == 0 {
		return nil
	}
	var m map[string]strictjson.Raw
	if strictjson.Unmarshal(meta, &m) != nil {
		return nil
	}
	return json.RawMessage(m[key])
}

// metaString returns a string member of a _meta object, of at most 256 bytes; "" when there is
// none.
func metaString(meta json.RawMessage, key string) string {
	var s string
	if raw := metaMember(meta, key); raw == nil || strictjson.Unmarshal(raw, &s) != nil || len(s) > 256 {
		return ""
	}
	return s
}

// withMeta returns a copy of a result with one more member in its _meta. A plugin may
// return one *Result to several callers, so it is not changed in place.
func withMeta(res *kernel.Result, key string, value any) *kernel.Result {
	m := make(map[string]strictjson.Raw)
	if strictjson.Unmarshal(res.Meta, &m) != nil || m == nil { // a _meta that is not an object has no members
		m = make(map[string]strictjson.Raw)
	}
	m[key] = strictjson.Raw(encode(value))
	out := *res
	out.Meta = encode(m)
	return &out
}
