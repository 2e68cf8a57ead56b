package manifest

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"

	"agentctl/strictjson"
)

// The schema registry. A file's name is its reference without the prefix:
// schemas/NAME@VERSION.json is mcp://schemas/NAME@VERSION. Devices send references,
// never schemas, and nothing is ever loaded from elsewhere.
//
//go:embed schemas/*.json
var schemaFiles embed.FS

// SchemaPrefix begins every schema reference; a relay serves them under /schemas/.
const SchemaPrefix = "mcp://schemas/"

// References of the product's own schemas; those of the tools are in Kinds.
const (
	CapabilityRef = SchemaPrefix + "agentctl.capability@1.0.0" // one announced capability
	AnnounceRef   = SchemaPrefix + "agentctl.announce@1.0.0"   // payload of announce
	ErrorRef      = SchemaPrefix + "agentctl.error@1.0.0"      // the error envelope
	ToolsCallRef  = SchemaPrefix + "agentctl.tools_call@1.0.0" // body of POST /mcp/tools/call
)

// schema is one registered schema. Each part is made at its first use, so that a process
// which validates nothing pays for nothing.
type schema struct {
	ref       string
	json      func() []byte        // compact
	object    func() *objectSchema // what this package understands of it
	validator func() validator     // all of it
}

// validator checks a value, decoded by strictjson.Decode, against all of a schema. Each build
// has its own engine (validator_full.go, validator_board.go). Its error may quote the value,
// so it is not shown; explain words one instead.
type validator func(tree any) error

// registry holds all schemas by full reference, made once. The map is read-only afterwards.
var registry = sync.OnceValue(func() map[string]*schema {
	names, err := fs.Glob(schemaFiles, "schemas/*.json")
	if err != nil {
		panic("manifest: " + err.Error()) // cannot happen: the pattern is constant
	}
	m := make(map[string]*schema, len(names))
	for _, file := range names {
		ref := SchemaPrefix + strings.TrimSuffix(strings.TrimPrefix(file, "schemas/"), ".json")
		s := &schema{ref: ref}
		s.json = sync.OnceValue(func() []byte { return compactFile(file) })
		s.object = sync.OnceValue(func() *objectSchema { return newObjectSchema(ref, s.json()) })
		s.validator = sync.OnceValue(func() validator { return mustCompile(m, ref) })
		m[ref] = s
	}
	return m
})

// compactFile returns a schema without white space, as it is served and compiled. It panics,
// as mustCompile does: the files are part of the program, and a test reads and compiles them
// all.
func compactFile(file string) []byte {
	raw, err := schemaFiles.ReadFile(file)
	var b bytes.Buffer
	if err = errors.Join(err, json.Compact(&b, raw)); err != nil {
		panic("manifest: " + file + ": " + err.Error())
	}
	return bytes.Clone(b.Bytes()) // b may have twice the capacity
}

// mustCompile compiles a registered schema with this build's engine.
func mustCompile(all map[string]*schema, ref string) validator {
	v, err := compile(all, ref)
	if err != nil {
		panic("manifest: compile " + ref + ": " + err.Error())
	}
	return v
}

// lookupSchema finds a schema by its full reference or by NAME@VERSION.
func lookupSchema(ref string) (*schema, bool) {
	s, ok := registry()[ref]
	if !ok && !strings.HasPrefix(ref, SchemaPrefix) {
		s, ok = registry()[SchemaPrefix+ref]
	}
	return s, ok
}

// SchemaNames lists the references of all schemas in ascending order.
func SchemaNames() []string { return slices.Sorted(maps.Keys(registry())) }

// Schema returns a schema as compact JSON. ref is a full reference or NAME@VERSION. The
// bytes are shared: read only.
func Schema(ref string) (raw []byte, ok bool) {
	s, ok := lookupSchema(ref)
	if !ok {
		return nil, false
	}
	return s.json(), true
}

// Validate checks one JSON value against the schema of a reference. A value that does not
// fit is E_MANIFEST_INVALID; so are malformed JSON, duplicate keys, nesting deeper than 16
// levels and numbers that as a float64 become whole or infinite. The
// message says what is wrong by the schema's own names and quotes nothing of the value.
//
// Most values are flat objects in plain form, which scan accepts in one pass without
// allocation. Whatever it does not accept goes through the validator.
func Validate(ref string, raw []byte) error {
	s, ok := lookupSchema(ref)
	if !ok {
		return errNoSchema()
	}
	if _, ok := s.object().scan(raw); ok {
		return nil
	}
	_, err := s.validate(raw)
	return err
}

// CheckArgs validates a tool's arguments and returns them in normal form: without white
// space, and with 5000 for 5000.0 or 5e3 where the schema says integer. Arguments in normal
// form come back as they are, without a copy.
func CheckArgs(ref string, raw []byte) ([]byte, error) {
	s, ok := lookupSchema(ref)
	if !ok {
		return nil, errNoSchema()
	}
	if found, ok := s.object().scan(raw); ok && found.compact {
		return raw, nil
	}
	if _, err := s.validate(raw); err != nil {
		return nil, err
	}
	return s.object().normalize(raw), nil
}

// Reasons in the *Error of CheckResult and CheckFrame, for the audit log.
const (
	ReasonBadResult   = "bad_result"   // does not fit the schema
	ReasonForeignNode = "foreign_node" // names another node
	ReasonLineBreak   = "line_break"   // a frame with CR or LF
	ReasonFrameSize   = "frame_size"   // a frame over MaxSample
	ReasonEcho        = "echo"         // an echo of something else
)

// CheckAnswer is CheckResult for the answer to a command with these arguments. It also compares
// what system.echo answers with what was sent: a board could otherwise put any text into the result
// of a caller that expects its own. The arguments have passed CheckArgs.
func CheckAnswer(t *Tool, args, result []byte) error {
	if err := CheckResult(t.Verb.Ack, result, t.Name().NodeID); err != nil {
		return err
	}
	if t.Kind.Name == KindEcho && !sameMessage(args, result) {
		return errBadAnswer(ReasonEcho)
	}
	return nil
}

// sameMessage compares the member message of two valid objects. Our boards answer with the same
// bytes in the same place, which needs no decoding.
func sameMessage(args, result []byte) bool {
	if n := len(args) - 1; n > 0 && len(result) > n && bytes.HasPrefix(args, []byte(`{"message":"`)) &&
		bytes.Equal(args[:n], result[:n]) && result[n] == ',' {
		return true
	}
	var sent, got struct {
		Message string `json:"message"`
	}
	return json.Unmarshal(args, &sent) == nil && json.Unmarshal(result, &got) == nil && sent == got
}

// CheckResult checks what a device answered: against the schema, and that a node_id in it
// is the one that the link is bound to (RFC-0005 §6.8). The error is E_INTERNAL, since the
// caller did nothing wrong, and has a Reason.
func CheckResult(ref string, raw []byte, nodeID string) error {
	s, ok := lookupSchema(ref)
	if !ok {
		return errNoSchema()
	}
	object := s.object()
	if found, ok := object.scan(raw); ok {
		return checkNode(object, found.nodeID, nodeID)
	}
	tree, err := s.validate(raw)
	if err != nil {
		return errBadAnswer(ReasonBadResult)
	}
	o, _ := tree.(map[string]any)
	id, _ := o["node_id"].(string)
	return checkNode(object, []byte(id), nodeID)
}

// MaxSample bounds a metric frame, in bytes. A frame in plain form has some 250; a padded one
// would be copied to every subscriber of the stream.
const MaxSample = 4096

// CheckFrame is CheckResult for a metric frame. Its bytes go to subscribers as they are, so it
// also refuses a line break, which could end an event early.
func CheckFrame(raw []byte, nodeID string) error {
	if len(raw) > MaxSample {
		return errBadAnswer(ReasonFrameSize)
	}
	if bytes.ContainsAny(raw, "\r\n") {
		return errBadAnswer(ReasonLineBreak)
	}
	return CheckResult(FrameRef, raw, nodeID)
}

// checkNode compares the node_id of an answer, if the schema has one, with the link's.
func checkNode(sh *objectSchema, got []byte, bound string) error {
	if sh.hasNode && string(got) != bound {
		return errBadAnswer(ReasonForeignNode)
	}
	return nil
}

// errBadAnswer is for the caller; the reason goes into the audit log.
func errBadAnswer(reason string) *Error {
	return &Error{Code: Internal, Message: "the device's answer is not what this tool may answer", Reason: reason}
}

// errNoSchema is a bug in this program: references come from the kind registry.
func errNoSchema() *Error {
	return &Error{Code: Internal, Message: "no schema is registered under this reference", Reason: "schema_ref"}
}

// validate is the slow path: it decodes the value, asks the validator, and words the error.
func (s *schema) validate(raw []byte) (tree any, err error) {
	tree, err = strictjson.Decode(raw)
	if err != nil {
		return nil, E(ManifestInvalid, s.object().noun+"s: "+err.Error())
	}
	if s.validator()(tree) != nil {
		return nil, E(ManifestInvalid, s.object().explain(tree))
	}
	return tree, nil
}
