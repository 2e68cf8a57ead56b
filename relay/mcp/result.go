package mcp

import (
	"bytes"
	"encoding/json"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/relay/kernel"
)

// rawJSON is JSON that is encoded as it is.
type rawJSON []byte

// MarshalJSON implements json.Marshaler.
func (r rawJSON) MarshalJSON() ([]byte, error) { return r, nil }

// result is an SDK result made of bytes: schemas and device answers pass without being
// decoded. It embeds the SDK's ResultBase for its unexported marker method.
type result struct {
	sdk.ResultBase
	body []byte
}

// MarshalJSON implements json.Marshaler. The SDK marshals each result once, to write it.
func (r *result) MarshalJSON() ([]byte, error) { return r.body, nil }

// serverInfoSet makes the SDK skip adding the server's name to _meta: finishResult has
// written it.
var serverInfoSet = map[string]any{sdk.MetaKeyServerInfo: true}

// GetMeta implements sdk.Result.
func (r *result) GetMeta() map[string]any { return serverInfoSet }

// emptyResult is the answer to a request that has nothing to report, such as a subscribe.
func emptyResult() *result { return &result{body: []byte("{}")} }

// objectBuilder appends a JSON object to a buffer, member by member. Keys are literals of
// this package, so they are not escaped. Results are built this way and not marshaled from
// structs: a list of 200 tools is mostly schemas, which are bytes already.
type objectBuilder struct {
	b       []byte
	members int
}

// newObject makes a builder with a capacity of size bytes, so that a page grows rarely. size is an
// estimate: a larger object only costs a copy.
func newObject(size int) *objectBuilder { return &objectBuilder{b: make([]byte, 0, size)} }

// key begins a member; the caller appends the value to b.b.
func (b *objectBuilder) key(k string) {
	c := byte(',')
	if b.members == 0 {
		c = '{'
	}
	b.members++
	b.b = append(b.b, c, '"')
	b.b = append(b.b, k...)
	b.b = append(b.b, '"', ':')
}

// raw appends a member whose value is JSON already.
func (b *objectBuilder) raw(k string, v []byte) { b.key(k); b.b = append(b.b, v...) }

// str appends a member whose value is a string.
func (b *objectBuilder) str(k, v string) { b.key(k); b.b = appendString(b.b, v) }

// optional appends a string unless it is empty.
func (b *objectBuilder) optional(k, v string) {
	if v != "" {
		b.str(k, v)
	}
}

// Result types of the modern era.
const (
	resultComplete      = "complete"
	resultInputRequired = "input_required"
)

// finishResult ends an object. The modern era wants a result type and the server's name
// in every result, and cache fields in those of lists and reads (cacheMS, below 0: none).
// meta, if any, is the _meta that the kernel and the plugin gave.
func (t *tenant) finishResult(b *objectBuilder, x *exchange, resultType string, cacheMS int64, meta []byte) *result {
	if x.modern {
		b.str("resultType", resultType)
		if cacheMS >= 0 {
			b.key("ttlMs")
			b.b = strconv.AppendInt(b.b, cacheMS, 10)
			b.str("cacheScope", "private")
		}
		if !bytes.Contains(meta, []byte(sdk.MetaKeyServerInfo)) { // a plugin that is a server names itself
			meta = kernel.JoinMeta(t.h.serverMeta, meta)
		}
	}
	if len(meta) > 0 {
		b.raw("_meta", meta)
	}
	if b.members == 0 {
		b.b = append(b.b, '{')
	}
	return &result{body: append(b.b, '}')}
}

// serverMeta renders the _meta that names the server, once for all results.
func serverMeta(i *sdk.Implementation) []byte {
	data, _ := json.Marshal(map[string]any{sdk.MetaKeyServerInfo: i}) // strings only
	return data
}

// appendString appends s as a JSON string; bytes that are not UTF-8 become U+FFFD.
func appendString[S ~string | ~[]byte](b []byte, s S) []byte {
	b, _ = jsontext.AppendQuote(b, s) // the error reports the replacement
	return b
}

// appendText appends a text block.
func appendText[S ~string | ~[]byte](b []byte, text S) []byte {
	b = append(b, `{"type":"text","text":`...)
	return append(appendString(b, text), '}')
}
