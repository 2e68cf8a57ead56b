package mcp

import (
	"encoding/json"
	"strings"
	"sync"

	"agentctl/lazyregexp"
)

// A failure is a tool result too: isError, and the error envelope as structured content.
// MCP wants structured content to match the tool's output schema, and clients check it
// (the TypeScript SDK of the legacy era also when isError is set; it then reports a schema
// violation instead of the failure). So the output schema that a client sees admits the
// envelope beside the tool's own answer.

// errorSchema is the envelope's error object (RFC-0001 §4).
const errorSchema = `{"type":"object","description":"in place of the rest, when the call failed (isError)",` +
	`"properties":{"code":{"type":"string"},"message":{"type":"string"},"outcome":{"type":"string"},"reason":{"type":"string"},"retryable":{"type":"boolean"},"trace_id":{"type":"string"}},"required":["code","message"]}`

// schemaCache caches the results of withErrorSchema: boards of one model have the same schemas.
// A full cache is emptied, which costs the next list some work and needs no order of use.
type schemaCache struct {
	mu      sync.Mutex // protects byInput
	byInput map[string][]byte
}

// maxCachedSchemas bounds a schemaCache. Plugins choose their schemas, so there may be any
// number of them.
const maxCachedSchemas = 512

// withErrorSchema returns the widened schema, from the cache if it was made before. Lists
// of hundreds of boards ask for the same few schemas.
func (o *schemaCache) withErrorSchema(schema []byte) []byte {
	o.mu.Lock()
	defer o.mu.Unlock()
	if s, ok := o.byInput[string(schema)]; ok {
		return s
	}
	if o.byInput == nil || len(o.byInput) >= maxCachedSchemas {
		o.byInput = make(map[string][]byte)
	}
	s := withErrorSchema(schema)
	o.byInput[string(schema)] = s
	return s
}

// withErrorSchema returns the schema of a tool's answer or of its failure. The properties
// stay at the root, where people and programs look for them; $id is removed, because this
// is no longer the registered document. A schema with combinators is wrapped as a whole.
func withErrorSchema(schema []byte) []byte {
	var s, props map[string]json.RawMessage
	if json.Unmarshal(schema, &s) != nil || json.Unmarshal(s["properties"], &props) != nil {
		return anyOfErrorSchema(schema)
	}
	for _, word := range []string{"anyOf", "oneOf", "allOf", "not", "if", "$ref", "propertyNames", "minProperties"} {
		if _, ok := s[word]; ok {
			return anyOfErrorSchema(schema)
		}
	}
	if _, ok := props["error"]; ok {
		return schema // it describes failures itself
	}
	props["error"] = json.RawMessage(errorSchema)
	s["properties"], _ = json.Marshal(props)
	if required, ok := s["required"]; ok {
		s["oneOf"] = json.RawMessage(`[{"required":` + string(required) + `},{"required":["error"]}]`)
		delete(s, "required")
	}
	delete(s, "$id")
	b, err := json.Marshal(s)
	if err != nil {
		return schema
	}
	return b
}

// anyOfErrorSchema wraps a schema that is not a plain list of properties.
func anyOfErrorSchema(schema []byte) []byte {
	return anyOfSchema(schema, `{"type":"object","properties":{"error":`+errorSchema+`},"required":["error"]}`)
}

// packedSchema is the schema of a result that the stage compress has packed. Its one member has a name
// that no tool's answer has.
const packedSchema = `{"type":"object","description":"in place of the rest, when the result is packed","properties":{"agentctl/packed":{"type":"object",` +
	`"properties":{"alg":{"type":"string"},"bytes":{"type":"integer"},"data":{"type":"string"}},"required":["alg","bytes","data"]}},"required":["agentctl/packed"]}`

// withPackedSchema returns a schema that admits a packed result as well. It is not cached: the lists of
// an operator who packs results cost a little more.
func withPackedSchema(schema []byte) []byte { return anyOfSchema(schema, packedSchema) }

// localRef finds references to a part of the same document.
var localRef = lazyregexp.New(`"\$ref"\s*:\s*"#([^"]*)"`)

// anyOfSchema returns a schema that admits an alternative as well. The schema is no longer the root of
// its document, so the definitions that it refers to are repeated there. A schema that refers to
// other parts of itself becomes one that admits any object.
func anyOfSchema(schema []byte, alternative string) []byte {
	var s map[string]json.RawMessage
	if json.Unmarshal(schema, &s) != nil {
		return anyObjectSchema
	}
	b := append(make([]byte, 0, len(schema)+len(alternative)+64), `{"type":"object",`...)
	for _, word := range []string{"$defs", "definitions"} {
		if defs, ok := s[word]; ok {
			b = append(append(append(append(b, '"'), word...), `":`...), defs...)
			b = append(b, ',')
		}
	}
	if _, hasBase := s["$id"]; !hasBase { // with $id, references are resolved in the schema wherever it is
		for _, at := range localRef.FindAllStringSubmatchIndex(string(schema), -1) {
			if ref := string(schema[at[2]:at[3]]); !strings.HasPrefix(ref, "/$defs/") && !strings.HasPrefix(ref, "/definitions/") {
				return anyObjectSchema
			}
		}
	}
	b = append(append(b, `"anyOf":[`...), schema...)
	return append(append(append(b, ','), alternative...), "]}"...)
}
