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

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/strictjson"
)

// Algorithm is the only one.
const Algorithm = "HMAC-SHA256"

// Bounds of keys.
const (
	minKey     = 32 // bytes
	maxKey     = 4096
	maxSigners = 16
)

// ErrSignature is returned for a message that its signature does not fit.
var ErrSignature = errors.New("stages: the signature does not fit the message")

// Signature travels in _meta under MetaSignature.
type Signature struct {
	Alg string `json:"alg"` // Algorithm
	Kid string `json:"kid"` // which key
	Sig string `json:"sig"` // hex
}

// Message is what a signature covers. Of a request these are Tool and Arguments, or URI;
// of a result also Structured, Content and IsError, or Data. Content is what the tool
// gave: a lone text block that repeats the structured content does not count. Nonce is
// the request's MetaNonce, also in the result's message: it ties the two together.
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

// canonical is the message as RFC 8785 writes JSON, except that whole numbers beyond
// 2^53 keep their digits.
func (m *Message) canonical() ([]byte, error) {
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

// Verify holds a signature against a message; the error is ErrSignature, or that the
// message is not JSON.
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

func (m *Message) sum(key []byte) ([]byte, error) {
	text, err := m.canonical()
	if err != nil {
		return nil, err
	}
	h := hmac.New(sha256.New, key)
	h.Write(text)
	return h.Sum(nil), nil
}

// ResultMessage is the message of a request's result.
func ResultMessage(r *kernel.Request, res *kernel.Result) *Message {
	m := &Message{Kind: "result", Tool: r.Tool, URI: r.URI, Nonce: text(r.Meta, MetaNonce),
		Structured: res.Structured, Content: res.Content, IsError: res.IsError, Input: res.InputRequests}
	if r.Method == kernel.MethodRead {
		sum := sha256.Sum256(res.Data)
		m.Tool, m.Data = "", hex.EncodeToString(sum[:])
	}
	return m
}

// RequestMessage is the message of a request, with its arguments as they came.
func RequestMessage(r *kernel.Request) *Message {
	m := &Message{Kind: "request", Tool: r.Tool, URI: r.URI, Nonce: text(r.Meta, MetaNonce), Arguments: r.Arguments}
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

// signer signs results and checks the signatures of requests. Errors, streams and
// protocol faults carry no signature.
type signer struct {
	cfg struct {
		keyRef
		Require bool     `json:"require"` // refuse requests without a signature
		Accept  []keyRef `json:"accept"`  // further keys of requests
	}
	keys map[string][]byte // by kid
}

func newSign(e *env, config []byte) (stage, error) {
	s := &signer{keys: make(map[string][]byte)}
	s.cfg.Accept = []keyRef{}
	var accept []strictjson.Raw
	err := decode("sign", config,
		field{"kid", &s.cfg.Kid, wantKid},
		field{"key_file", &s.cfg.File, wantFile},
		field{"require", &s.cfg.Require, "true or false"},
		field{"accept", &accept, "a list of {kid, key_file}"})
	if err != nil {
		return nil, err
	}
	if s.cfg.Accept, err = decodeList("sign.accept", accept, maxSigners, func(where string, data []byte) (k keyRef, err error) {
		return k, decode(where, data, field{"kid", &k.Kid, wantKid}, field{"key_file", &k.File, wantFile})
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

func (s *signer) load(dir, where string, k keyRef) error {
	if !keyName(k.Kid) || strings.Contains(k.Kid, ".") || s.keys[k.Kid] != nil {
		return wrong(where+".kid", wantKid)
	}
	key, err := readKey(dir, k.File)
	if err != nil {
		return wrong(where+".key_file", wantFile)
	}
	s.keys[k.Kid] = key
	return nil
}

// keyName keeps the name of a key or its file to one plain path element.
func keyName(s string) bool {
	return s != "" && len(s) <= 64 && s[0] != '.' && !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '_' && r != '-' && r != '.'
	})
}

// readKey reads a key that only its owner may read. The directory's root keeps symbolic
// links inside.
func readKey(dir, name string) ([]byte, error) {
	if dir == "" || !keyName(name) {
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

func (s *signer) wrap(next kernel.Handler) kernel.Handler {
	return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
		if err := s.check(r); err != nil {
			return nil, err
		}
		res, err := next(ctx, r)
		if err != nil || res == nil || res.Stream != nil || res.RPCError != nil {
			return res, err
		}
		sig, err := ResultMessage(r, res).Sign(s.cfg.Kid, s.keys[s.cfg.Kid])
		if err != nil {
			return nil, &manifest.Error{Code: manifest.Internal, Message: "the answer is not the JSON that it should be, so it cannot be signed", Reason: "sign"}
		}
		return withMeta(res, MetaSignature, sig), nil
	}
}

// check holds a request against its signature, if it has or needs one.
func (s *signer) check(r *kernel.Request) error {
	raw := member(r.Meta, MetaSignature)
	if raw == nil {
		if !s.cfg.Require {
			return nil
		}
		return &manifest.Error{Code: manifest.SafetyDenied, Message: "this relay takes signed requests only; sign it in _meta " + MetaSignature, Reason: "unsigned"}
	}
	var sig Signature
	if strictjson.Unmarshal(raw, &sig) == nil {
		if key := s.keys[sig.Kid]; key != nil && RequestMessage(r).Verify(sig, key) == nil {
			return nil
		}
	}
	return &manifest.Error{Code: manifest.SafetyDenied, Message: "the request's signature does not fit it", Reason: "signature"}
}
