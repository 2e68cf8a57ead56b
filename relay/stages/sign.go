package stages

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"agentctl/lazyregexp"
	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/strictjson"
)

// Signatures work like this:
//
// 	request  the client puts a Signature and a nonce into _meta; the stage verifies it
// 	         over Message{Kind: "request"} and refuses the request if it does not match
// 	result   the stage signs Message{Kind: "result"} and puts the Signature into _meta
//
// Both sides compute the HMAC over the canonical JSON of the Message (RFC 8785), so that
// white space and the order of members do not matter. The nonce alone does not prevent
// replays: a client must compare the nonce of the result with its own.

// Algorithm is the value of Signature.Alg.
const Algorithm = "HMAC-SHA256"

// Bounds of keys.
const (
	minKey     = 32 // bytes
	maxKey     = 4096
	maxSigners = 16
)

// ErrSignature is returned for a signature that does not match the message.
var ErrSignature = errors.New("stages: the signature does not match the message")

// Signature is the value of MetaSignature in _meta.
type Signature struct {
	Alg string `json:"alg"` // Algorithm
	Kid string `json:"kid"` // the id of the key
	Sig string `json:"sig"` // HMAC of Message.Canonical, hex
}

// Message is what a signature covers: of a request Tool and Arguments, or URI; of a result
// also Structured, Content and IsError, or Data. Content is what the tool returned,
// without the text block that repeats the structured content, and nothing of a structured result over
// plain HTTP. Nonce is the request's
// MetaNonce in both messages: it binds the result to the request.
type Message struct {
	Kind       string            `json:"kind"`           // "request" or "result"
	Tool       string            `json:"tool,omitempty"` // canonical spelling
	URI        string            `json:"uri,omitempty"`
	Nonce      string            `json:"nonce,omitempty"`
	Arguments  json.RawMessage   `json:"arguments,omitempty"`
	Structured json.RawMessage   `json:"structured,omitempty"`
	Content    []json.RawMessage `json:"content,omitempty"`
	IsError    bool              `json:"is_error,omitempty"`
	Data       string            `json:"data_sha256,omitempty"` // hex, of a resource's bytes
	Input      json.RawMessage   `json:"input_requests,omitempty"`
}

// Canonical returns the bytes that are signed: the message in the form of RFC 8785, except that whole numbers beyond
// 2^53 keep their digits.
func (m *Message) Canonical() ([]byte, error) {
	raw, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("stages: sign: %w", err)
	}
	v := jsontext.Value(raw)
	if err := v.Format(jsontext.ReorderRawObjects(true), jsontext.CanonicalizeRawFloats(true)); err != nil {
		return nil, fmt.Errorf("stages: sign: %w", err)
	}
	return bytes.TrimSpace(v), nil
}

// Sign makes the signature of a message.
func (m *Message) Sign(kid string, key []byte) (Signature, error) {
	sum, err := m.sum(key)
	return Signature{Algorithm, kid, hex.EncodeToString(sum)}, err
}

// Verify checks the signature of a message. The error is ErrSignature, or that the message
// is not JSON.
func (m *Message) Verify(s Signature, key []byte) error {
	sum, err := m.sum(key)
	if err != nil {
		return err
	}
	got, err := hex.DecodeString(s.Sig)
	if err != nil || s.Alg != Algorithm || !hmac.Equal(got, sum) {
		return ErrSignature
	}
	return nil
}

// sum returns the HMAC of the canonical message.
func (m *Message) sum(key []byte) ([]byte, error) {
	text, err := m.Canonical()
	if err != nil {
		return nil, err
	}
	h := hmac.New(sha256.New, key)
	h.Write(text)
	return h.Sum(nil), nil
}

// transportHTTP is Caller.Transport of POST /mcp/tools/call, whose answers have structured content or
// content, but not both.
const transportHTTP = "http"

// ResultMessage returns the message of a request's result, with what its caller gets.
func ResultMessage(r *kernel.Request, res *kernel.Result) *Message {
	m := &Message{Kind: "result", Tool: r.Tool, URI: r.URI, Nonce: metaString(r.Meta, MetaNonce),
		Structured: res.Structured, Content: res.Content, IsError: res.IsError, Input: res.InputRequests}
	if r.Caller.Transport == transportHTTP && len(m.Structured) > 0 {
		m.Content = nil
	}
	if r.Method == kernel.MethodRead {
		sum := sha256.Sum256(res.Data)
		m.Tool, m.Data = "", hex.EncodeToString(sum[:])
	}
	return m
}

// RequestMessage returns the message of a request, with its arguments as the client sent
// them.
func RequestMessage(r *kernel.Request) *Message {
	m := &Message{Kind: "request", Tool: r.Tool, URI: r.URI, Nonce: metaString(r.Meta, MetaNonce), Arguments: r.Arguments}
	if len(m.Arguments) == 0 && r.Method != kernel.MethodRead {
		m.Arguments = json.RawMessage("{}")
	}
	return m
}

// keyRef names a key and the file that holds it.
type keyRef struct {
	Kid  string `json:"kid"`
	File string `json:"key_file"` // a name in the key directory
}

// signer signs results and checks the signatures of requests. Errors and streams carry no
// signature. Keys are read once, when the stage is configured.
type signer struct {
	cfg struct {
		keyRef
		// Require refuses requests without a signature.
		Require bool `json:"require"`
		// Accept are further keys that requests may be signed with.
		Accept []keyRef `json:"accept"`
	}
	keys map[string][]byte // by kid
}

// newSign makes the stage and reads its keys. A later change of a key file takes effect with
// the next configuration.
func newSign(e *env, config []byte) (stage, error) {
	s := &signer{keys: make(map[string][]byte)}
	s.cfg.Accept = []keyRef{}
	var accept []strictjson.Raw
	keyFields := func(k *keyRef) []field {
		return []field{{"kid", &k.Kid, wantKid, nil}, {"key_file", &k.File, wantFile, nil}}
	}
	err := decode("sign", config, append(keyFields(&s.cfg.keyRef),
		boolField("require", &s.cfg.Require),
		field{"accept", &accept, "a list of {kid, key_file}", nil})...)
	if err != nil {
		return nil, err
	}
	if s.cfg.Accept, err = decodeList("sign.accept", accept, maxSigners, func(where string, data []byte) (k keyRef, err error) {
		return k, decode(where, data, keyFields(&k)...)
	}); err != nil {
		return nil, err
	}
	if err := s.load(e.opt.KeyDir, "sign", s.cfg.keyRef); err != nil {
		return nil, err
	}
	for i, k := range s.cfg.Accept {
		if err := s.load(e.opt.KeyDir, fmt.Sprintf("sign.accept[%d]", i), k); err != nil {
			return nil, err
		}
	}
	return s, nil
}

const (
	wantKid  = "a name of 1 to 64 letters, digits, _ and -, each once"
	wantFile = "the name of a file in the relay's key directory, mode 0600, with a key of 32 to 4096 bytes"
)

// load reads one key, whose id must be new.
func (s *signer) load(dir, where string, k keyRef) error {
	if !keyName.MatchString(k.Kid) || strings.Contains(k.Kid, ".") || s.keys[k.Kid] != nil {
		return invalid(where+".kid", wantKid)
	}
	key, err := readKey(dir, k.File)
	if err != nil {
		return invalid(where+".key_file", wantFile)
	}
	s.keys[k.Kid] = key
	return nil
}

// keyName is the form of a key id and of a key file: one plain path element.
var keyName = lazyregexp.New(`^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$`)

// readKey reads a key file that only its owner may read. os.Root refuses symbolic links
// that lead out of the directory. Line breaks at the end are not part of the key, since editors
// add them. load reports the same for every error, which does not reveal the files there.
func readKey(dir, name string) ([]byte, error) {
	if dir == "" || !keyName.MatchString(name) {
		return nil, os.ErrInvalid
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = root.Close() }()
	info, err := root.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o077 != 0 || info.Size() > maxKey {
		return nil, os.ErrPermission
	}
	key, err := root.ReadFile(name)
	if err != nil {
		return nil, err
	}
	if key = bytes.TrimRight(key, "\r\n"); len(key) < minKey {
		return nil, os.ErrInvalid
	}
	return key, nil
}

func (s *signer) config() any { return s.cfg }

// wrap verifies the request before the inner stages run, and signs the result after them.
func (s *signer) wrap(next kernel.Handler) kernel.Handler {
	return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
		if r.Inner { // the request that it belongs to was signed, if it had to be
			return next(ctx, r)
		}
		if err := s.check(r); err != nil {
			return nil, err
		}
		res, err := next(ctx, r)
		if err != nil || res == nil || res.Stream != nil || res.RPCError != nil {
			return res, err
		}
		sig, err := ResultMessage(r, res).Sign(s.cfg.Kid, s.keys[s.cfg.Kid])
		if err != nil {
			return nil, &manifest.Error{Code: manifest.Internal, Message: "the answer is not valid JSON, so it cannot be signed", Reason: "sign"}
		}
		return withMeta(res, MetaSignature, sig), nil
	}
}

// check verifies the signature of a request, if it has or needs one. An unknown key and a wrong
// signature get the same error, so that key ids cannot be probed.
func (s *signer) check(r *kernel.Request) error {
	raw := metaMember(r.Meta, MetaSignature)
	if raw == nil {
		if !s.cfg.Require {
			return nil
		}
		return &manifest.Error{Code: manifest.SafetyDenied, Message: "this relay accepts only signed requests; put a signature into _meta " + MetaSignature, Reason: "unsigned"}
	}
	var sig Signature
	if strictjson.Unmarshal(raw, &sig) == nil {
		if key := s.keys[sig.Kid]; key != nil && RequestMessage(r).Verify(sig, key) == nil {
			return nil
		}
	}
	return &manifest.Error{Code: manifest.SafetyDenied, Message: "the request's signature does not match it", Reason: "signature"}
}
