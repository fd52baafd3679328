-- Every key, every state, and every way from one state to another. One call is one transition,
-- and writes its event in the same breath: record and stream cannot disagree.
--
--   action    from                        to                           asked for by
--   create    (none)                      waiting, queued              a client
--   claim     queued                      running                      a worker
--   beat      running cancelling pausing  the same                     a worker, which hears go, cancel or pause
--   advance   running                     queued                       a worker, with this stage done
--             cancelling                  cancelled, failed
--             pausing                     paused
--   release   running                     queued                       a worker, with everything saved
--             cancelling                  cancelled, failed
--             pausing                     paused
--   die       running                     queued, failed               a worker; or its lease ran out
--             cancelling                  cancelled, failed
--             pausing                     paused, failed
--   finish    running cancelling pausing  succeeded, failed            a worker
--   cancel    waiting queued paused       cancelled                    a client
--             running pausing             cancelling
--   pause     waiting queued              paused                       a client
--             running                     pausing
--   resume    paused                      waiting, queued              a client
--             pausing                     running
--   retry     failed cancelled            waiting, queued, cancelled   a client
--   delete    succeeded failed cancelled  (none)                       a client
--   due       waiting queued              failed                       its deadline, which a pause takes away
--             running pausing             cancelling                   (what the deadline cancels ends as failed)
--   settle    waiting                     waiting, queued, cancelled   the end of a job that it depends on
--             paused                      paused, cancelled
--
-- kd:format               string  the version of all this; records of the version before are upgraded at the first call
-- kd:job:{id}             hash    the record: the truth about a job; nested values as JSON under dotted names
-- kd:job:{id}:events      stream  type and data (JSON) of what happened, about the last 10 000
-- kd:job:{id}:{series}    zset    metrics, evaluation, temperature: data by step, at most 8 192 of each, spread evenly
-- kd:job:{id}:waits       set     jobs that it depends on and that have not succeeded
-- kd:job:{id}:dependents  set     jobs that have it in their waits
-- kd:job:{id}:study       list    of a search: the journal of its Optuna study, one JSON line each
-- kd:job:{id}:trials      hash    of a search: number of a trial -> id of its job, whose 'parent' is the search
-- kd:index:{owner}:{status}  zset every job by time of creation (microseconds); * stands for any owner or status
-- kd:queue:{stage}        zset    the queued ones, by priority, then by time of creation
-- kd:open                 zset    those that have not ended, by time of creation
-- kd:leases               zset    those that a worker has, by the time at which its lease ends
-- kd:deadlines            zset    open ones that have one, by deadline
-- kd:idempotency:{sha}    string  "job-id body-sha" of a POST that carried an Idempotency-Key, for a day
-- kd:caches:{owner}       set     fingerprints of the caches that the owner's jobs made or read
-- kd:records              hash    owner -> bytes of its jobs' records, ended ones too, as they were made
-- kd:cache:{fp}:jobs      set     jobs that made or read a cache
-- kd:webhooks             zset    "job event-id" of what a webhook is to be told, by the time to try
-- kd:webhooks:tries       hash    the same -> failed tries
-- kd:counters             hash    what happened how often, by the name of its Prometheus sample
-- kd:worker:{id}          string  a worker's own sign of life, with a TTL (the worker writes it)
-- kd:workers              set     ids of workers, of which some may be gone
-- kd:celery:{stage}       list    Celery's: hints that a job is queued, never the truth
--
-- Fencing: claim hands out the next fence; whoever shows an older one is told "fenced" and changes nothing.
-- Attempts: a claim starts a new one only where the last one died ('fresh'); a clean stop is the same attempt.
-- A search is driven by the reconciler of an API, with a claim like any other; with it end the trials that are open.
-- Times are milliseconds of this server's clock. Commands are those of Redis 6.2. No cluster: keys are computed.

local FORMAT = '2'
local DAY = 24 * 60 * 60
local EVENTS, POINTS = 10000, 8192
local TERMINAL = {succeeded = true, failed = true, cancelled = true}
local ACTIVE = {running = true, cancelling = true, pausing = true}
local OPEN = {'waiting', 'queued', 'running', 'cancelling', 'pausing', 'paused'}
local SERIES = {metrics = true, evaluation = true, temperature = true}
local REPLY = {running = 'go', cancelling = 'cancel', pausing = 'pause'}
local SECONDS = {1, 5, 15, 60, 300, 900, 3600, 14400, 86400, 604800, '+Inf'}

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local transitions = {}
local settling = {}  -- {job, the one that it waits for, which has ended}, still to be told

-- ---------------------------------------------------------------- the record

local function key(id, part) return 'kd:job:' .. id .. (part and ':' .. part or '') end

local function get(id, field) return redis.call('HGET', key(id), field) end

local function set(id, ...)
  redis.call('HSET', key(id), ...)
  redis.call('HINCRBY', key(id), 'version', 1)
end

local function emit(id, type, data)
  return redis.call('XADD', key(id, 'events'), 'MAXLEN', '~', EVENTS, '*', 'type', type, 'data', data)
end

-- The name of a sample as GET /metrics shows it; labels are name, value, name, value, ...
local function sample(name, labels)
  local pairs = {}
  for i = 1, #labels, 2 do pairs[#pairs + 1] = labels[i] .. '="' .. labels[i + 1] .. '"' end
  return name .. '{' .. table.concat(pairs, ',') .. '}'
end

local function count(name, labels, amount)
  redis.call('HINCRBYFLOAT', 'kd:counters', sample(name, labels), amount or 1)
end

local function observe(name, labels, seconds)
  count(name .. '_sum', labels, seconds)
  count(name .. '_count', labels)
  for _, bound in ipairs(SECONDS) do
    if bound == '+Inf' or seconds <= bound then
      local finer = {unpack(labels)}
      finer[#labels + 1], finer[#labels + 2] = 'le', bound
      count(name .. '_bucket', finer)
    end
  end
end

local function describe(id)
  local fields = redis.call('HMGET', key(id), 'status', 'stage', 'attempt', 'error', 'reason')
  local text = '{"status":"%s","stage":"%s","attempt":%s,"error":%s,"reason":%s}'
  return string.format(text, fields[1], fields[2], fields[3], fields[4], cjson.encode(fields[5] or cjson.null))
end

local function index(id, status, command)
  local created, owner = unpack(redis.call('HMGET', key(id), 'created_us', 'owner'))
  for _, who in ipairs({'*', owner}) do
    local name = 'kd:index:' .. who .. ':' .. status
    if command == 'add' then redis.call('ZADD', name, created, id) else redis.call('ZREM', name, id) end
  end
end

local function arm(id)
  local seconds = tonumber(get(id, 'deadline_seconds'))
  if not seconds then return end
  redis.call('HSET', key(id), 'deadline_at', now + 1000 * seconds)
  redis.call('ZADD', 'kd:deadlines', now + 1000 * seconds, id)
end

local function disarm(id)
  redis.call('ZREM', 'kd:deadlines', id)
  redis.call('HDEL', key(id), 'deadline_at')
end

-- Events and what hangs on a job that ended go after a month; a job that lives again keeps them.
local function keep(id, command)
  for _, part in ipairs({'events', 'metrics', 'evaluation', 'temperature', 'study', 'trials'}) do
    if command == 'PERSIST' then redis.call('PERSIST', key(id, part))
    else redis.call('EXPIRE', key(id, part), 30 * DAY) end
  end
end

-- ---------------------------------------------------------------- how a status changes

local ended

-- One priority is worth thirty years of age, and the score is still a whole number below 2^53.
local function queue(id)
  local created, priority, stage = unpack(redis.call('HMGET', key(id), 'created_us', 'priority', 'stage'))
  redis.call('ZADD', 'kd:queue:' .. stage, created - priority * 1e15, id)
end

local function move(id, status, ...)
  local before, stage = unpack(redis.call('HMGET', key(id), 'status', 'stage'))
  if before then index(id, before, 'remove') end
  if before == 'queued' then redis.call('ZREM', 'kd:queue:' .. stage, id) end
  redis.call('HDEL', key(id), 'reason')
  set(id, 'status', status, ...)
  index(id, status, 'add')
  if status == 'queued' then
    redis.call('HSET', key(id), 'queued_at', now, 'dispatched_at', now)
    queue(id)
  end
  if not ACTIVE[status] then
    redis.call('ZREM', 'kd:leases', id)
    redis.call('HDEL', key(id), 'worker')
  end
  if status == 'paused' or status == 'cancelling' then disarm(id) end
  if TERMINAL[status] then
    set(id, 'finished_at', now)
    redis.call('ZREM', 'kd:open', id)
    disarm(id)
  end
  count('kd_jobs_total', {'kind', get(id, 'kind'), 'status', status})
  local event = emit(id, 'status', describe(id))
  if (get(id, 'webhook') or '') ~= '' then redis.call('ZADD', 'kd:webhooks', now, id .. ' ' .. event) end
  if TERMINAL[status] then ended(id, status) end
  return status
end

local function each_trial(id, action)
  for _, trial in ipairs(redis.call('HVALS', key(id, 'trials'))) do transitions.change(action, trial) end
end

-- What else happens when a job ends: its trials stop, and jobs that wait for it go on or will never run.
function ended(id, status)
  local kind, started = unpack(redis.call('HMGET', key(id), 'kind', 'started_at'))
  if started then observe('kd_job_duration_seconds', {'kind', kind, 'status', status}, (now - started) / 1000) end
  each_trial(id, 'cancel')
  for _, other in ipairs(redis.call('SMEMBERS', key(id, 'dependents'))) do settling[#settling + 1] = {other, id} end
  if status == 'succeeded' then redis.call('DEL', key(id, 'dependents')) end
  keep(id, 'EXPIRE')
end

-- To the queue, or to the jobs that it has to wait for first.
local function enter(id, ...)
  if redis.call('SCARD', key(id, 'waits')) > 0 then return move(id, 'waiting', 'reason', 'dependencies', ...) end
  return move(id, 'queued', ...)
end

-- A worker has let go, with everything saved.
local function stopped(id, ...)
  local status, verdict = unpack(redis.call('HMGET', key(id), 'status', 'verdict'))
  if status == 'cancelling' and verdict then
    return move(id, 'failed', 'error', verdict, 'reason', cjson.decode(verdict).type)
  end
  if status == 'cancelling' then return move(id, 'cancelled') end
  if status == 'pausing' then return move(id, 'paused', ...) end
  return move(id, 'queued', ...)
end

local function died(id, failure)
  local attempt, before, limit, status = unpack(
    redis.call('HMGET', key(id), 'attempt', 'attempts_before', 'max_attempts', 'status'))
  count('kd_job_attempts_total', {'reason', cjson.decode(failure).type})
  if status ~= 'cancelling' and attempt - before >= tonumber(limit) then
    return move(id, 'failed', 'error', failure)
  end
  emit(id, 'warning', cjson.encode({message = cjson.decode(failure).detail}))
  return stopped(id, 'fresh', '1')
end

local function holds(id, fence)
  local status, current = unpack(redis.call('HMGET', key(id), 'status', 'fence'))
  if ACTIVE[status] and current == fence then return true end
  count('kd_fenced_writes_total', {})
  return false
end

-- ---------------------------------------------------------------- from a client

local function let_go(id)
  local fingerprint = get(id, 'cache.fingerprint')
  if fingerprint then redis.call('SREM', 'kd:cache:' .. cjson.decode(fingerprint) .. ':jobs', id) end
end

local function uses(id, fingerprint)
  let_go(id)
  redis.call('HSET', key(id), 'cache.fingerprint', cjson.encode(fingerprint))
  redis.call('SADD', 'kd:caches:' .. get(id, 'owner'), fingerprint)
  redis.call('SADD', 'kd:cache:' .. fingerprint .. ':jobs', id)
end

-- The first job of a list that cannot be waited for, and why; or nothing.
local function hopeless(owner, sees_all, ids)
  for _, other in ipairs(ids) do
    local status, whose = unpack(redis.call('HMGET', key(other), 'status', 'owner'))
    if not status or (whose ~= owner and sees_all ~= '1') then return {'bad_dependency', other, 'unknown'} end
    if status == 'failed' or status == 'cancelled' then return {'bad_dependency', other, status} end
  end
end

local function await(id, ids)
  for _, other in ipairs(ids) do
    local status = get(other, 'status')
    if status and status ~= 'succeeded' then
      redis.call('SADD', key(id, 'waits'), other)
      redis.call('SADD', key(other, 'dependents'), id)
    end
  end
end

local function open_jobs(owner)
  local total = 0
  for _, status in ipairs(OPEN) do total = total + redis.call('ZCARD', 'kd:index:' .. owner .. ':' .. status) end
  return total
end

local function begin(id, owner, ...)
  local created = clock[1] * 1000000 + clock[2]
  while redis.call('ZCOUNT', 'kd:index:*:*', created, created) > 0 do created = created + 1 end
  set(id, 'format', FORMAT, 'id', id, 'owner', owner, 'created_at', now, 'created_us', string.format('%.0f', created),
    'attempt', 0, 'attempts_before', 0, 'fence', 0, 'fresh', '1', 'error', 'null', ...)
  redis.call('ZADD', 'kd:open', created, id)
  index(id, '*', 'add')
  local fingerprint = get(id, 'cache.fingerprint')
  if fingerprint then uses(id, cjson.decode(fingerprint)) end
  arm(id)
end

-- Records never expire, so their bytes are counted; those of a version that did not count them weigh nothing.
local function weigh(owner, bytes)
  local total = redis.call('HINCRBY', 'kd:records', owner, bytes)
  if total <= 0 or redis.call('ZCARD', 'kd:index:' .. owner .. ':*') == 0 then
    redis.call('HDEL', 'kd:records', owner)
  end
end

-- create(id, owner, sees_all, key_sha or '', body_sha, max_open or '', max_bytes or '', field, value, ...)
--   -> {created | replayed | conflict, id} | {quota, open jobs} | {record_quota, bytes}
--    | {bad_dependency, id, its status or unknown}
function transitions.create(id, owner, sees_all, sha, body, max_open, max_bytes, ...)
  local earlier = sha ~= '' and redis.call('GET', 'kd:idempotency:' .. sha)
  if earlier then
    local other, other_body = string.match(earlier, '^(%S+) (%S+)$')
    if redis.call('EXISTS', key(other)) == 1 then
      return {other_body == body and 'replayed' or 'conflict', other}
    end
  end
  local fields = {...}
  local needed = {}
  local bytes = 0
  for i = 1, #fields, 2 do
    bytes = bytes + #fields[i] + #fields[i + 1]
    if fields[i] == 'depends_on' then needed = cjson.decode(fields[i + 1]) end
  end
  local refused = hopeless(owner, sees_all, needed)
  if refused then return refused end
  if max_open ~= '' and open_jobs(owner) >= tonumber(max_open) then return {'quota', tostring(open_jobs(owner))} end
  local total = bytes + (tonumber(redis.call('HGET', 'kd:records', owner) or '') or 0)
  if max_bytes ~= '' and total > tonumber(max_bytes) then return {'record_quota', string.format('%.0f', total)} end
  if sha ~= '' then redis.call('SET', 'kd:idempotency:' .. sha, id .. ' ' .. body, 'EX', DAY) end
  begin(id, owner, 'record_bytes', bytes, ...)
  weigh(owner, bytes)
  await(id, needed)
  enter(id)
  return {'created', id}
end

local changes = {}

function changes.cancel(id, status)
  if status == 'waiting' or status == 'queued' or status == 'paused' then return move(id, 'cancelled') end
  if status == 'running' or status == 'pausing' then return move(id, 'cancelling') end
  return (status == 'cancelling' or status == 'cancelled') and 'already'
end

function changes.pause(id, status)
  if status == 'pausing' or status == 'paused' then return 'already' end
  if status ~= 'waiting' and status ~= 'queued' and status ~= 'running' then return false end
  each_trial(id, 'pause')
  return move(id, status == 'running' and 'pausing' or 'paused')
end

function changes.resume(id, status)
  if status == 'waiting' or status == 'queued' or status == 'running' then return 'already' end
  if status ~= 'pausing' and status ~= 'paused' then return false end
  each_trial(id, 'resume')
  arm(id)
  if status == 'pausing' then return move(id, 'running') end
  return enter(id)
end

-- The job that it waits for has ended: did it succeed, or was all the waiting for nothing?
local function settle(id, other)
  local status, outcome = get(id, 'status'), get(other, 'status')
  if not status then return end
  if outcome == 'succeeded' and redis.call('SREM', key(id, 'waits'), other) == 1 then
    redis.call('HINCRBY', key(id), 'version', 1)
  end
  if status ~= 'waiting' and status ~= 'paused' then return end
  if outcome ~= 'succeeded' then
    local what = ({failed = 'failed', cancelled = 'was cancelled'})[outcome] or 'was deleted'
    local detail = string.format('%s, which this job depends on, %s.', other, what)
    local remedy = outcome and 'Retry that job, then this one.' or 'Create it anew with jobs that exist.'
    local failure = cjson.encode({type = 'dependency_failed', detail = detail, remedy = remedy})
    return move(id, 'cancelled', 'reason', 'dependency_failed', 'error', failure)
  end
  if status == 'waiting' and redis.call('SCARD', key(id, 'waits')) == 0 then return enter(id) end
end

function changes.retry(id, status)
  if status ~= 'failed' and status ~= 'cancelled' then return false end
  redis.call('HDEL', key(id), 'started_at', 'finished_at', 'verdict')
  redis.call('HSET', key(id), 'attempts_before', get(id, 'attempt'), 'fresh', '1', 'error', 'null')
  redis.call('ZADD', 'kd:open', get(id, 'created_us'), id)
  keep(id, 'PERSIST')
  arm(id)
  local needed = cjson.decode(get(id, 'depends_on'))
  await(id, needed)
  enter(id)
  for _, other in ipairs(needed) do
    local open = redis.call('ZSCORE', 'kd:open', other)
    if not open and redis.call('SISMEMBER', key(id, 'waits'), other) == 1 then settle(id, other) end
  end
  return get(id, 'status')
end

function changes.delete(id, status)
  local parent = get(id, 'parent')
  if not TERMINAL[status] or (parent and redis.call('ZSCORE', 'kd:open', parent)) then return false end
  let_go(id)
  for _, other in ipairs(cjson.decode(get(id, 'depends_on'))) do redis.call('SREM', key(other, 'dependents'), id) end
  index(id, status, 'remove')
  index(id, '*', 'remove')
  weigh(get(id, 'owner'), -(tonumber(get(id, 'record_bytes') or '') or 0))
  for _, part in ipairs({'events', 'metrics', 'evaluation', 'temperature', 'waits', 'dependents', 'study', 'trials'}) do
    redis.call('DEL', key(id, part))
  end
  redis.call('DEL', key(id))
  return 'deleted'
end

-- change(cancel | pause | resume | retry | delete, id) -> {done | already | illegal | unknown, the status now}
function transitions.change(action, id)
  local status = get(id, 'status')
  if not status then return {'unknown', ''} end
  local result = changes[action](id, status)
  if not result then return {'illegal', status} end
  if result == 'already' then return {'already', status} end
  return {'done', result}
end

-- ---------------------------------------------------------------- from a worker

local function fits(id, gpus, memory)
  local needed = redis.call('HMGET', key(id), 'gpus', 'memory')
  local devices, bytes = tonumber(needed[1] or ''), tonumber(needed[2] or '')
  return (not devices or devices <= tonumber(gpus)) and (not bytes or bytes <= tonumber(memory))
end

-- claim(id, stage, worker, lease_ms, gpus, memory) -> {id, fence, attempt, config, owner, request_id, traceparent},
-- or nothing where it does not wait for that, or needs more than the worker has
function transitions.claim(id, stage, worker, lease, gpus, memory)
  local status, waits_for, queued = unpack(redis.call('HMGET', key(id), 'status', 'stage', 'queued_at'))
  if status ~= 'queued' or waits_for ~= stage or not fits(id, gpus, memory) then return false end
  local fence = redis.call('HINCRBY', key(id), 'fence', 1)
  local attempt = redis.call('HINCRBY', key(id), 'attempt', get(id, 'fresh'))
  redis.call('HSETNX', key(id), 'started_at', now)
  redis.call('ZADD', 'kd:leases', now + lease, id)
  observe('kd_job_queue_wait_seconds', {'stage', stage}, (now - queued) / 1000)
  move(id, 'running', 'worker', worker, 'fresh', '0', 'batch', '0', 'heartbeat_at', now)
  local rest = redis.call('HMGET', key(id), 'config', 'owner', 'request_id', 'traceparent')
  return {id, fence, attempt, rest[1], rest[2], rest[3] or '', rest[4] or ''}
end

-- claim_next(stage, worker, lease_ms, gpus, memory) -> the same, for the first in the queue that fits:
-- a hint is good for any
function transitions.claim_next(stage, worker, lease, gpus, memory)
  local start = 0
  while true do
    local ids = redis.call('ZRANGE', 'kd:queue:' .. stage, start, start + 99)
    if #ids == 0 then return false end
    for _, id in ipairs(ids) do
      if fits(id, gpus, memory) then return transitions.claim(id, stage, worker, lease, gpus, memory) end
    end
    start = start + #ids
  end
end

-- A step that is run again (after a stop between two checkpoints) takes the place of its earlier point.
local function plot(id, series, data)
  local step = cjson.decode(data).step
  if type(step) ~= 'number' then return end
  local name = key(id, series)
  redis.call('ZREMRANGEBYSCORE', name, step, step)
  redis.call('ZADD', name, step, data)
  if redis.call('ZCARD', name) <= POINTS then return end
  local points = redis.call('ZRANGE', name, 0, -1, 'WITHSCORES')
  local kept = tonumber(points[2])
  local gap = (points[#points] - kept) / (POINTS / 2)  -- of steps: halving the list would wear its old part away
  for i = 3, #points - 2, 2 do
    if points[i + 1] - kept < gap then redis.call('ZREM', name, points[i]) else kept = tonumber(points[i + 1]) end
  end
end

-- beat(id, fence, lease_ms, batch, field_count, field, value, ..., type, data, ...) -> go | cancel | pause | fenced
-- A batch that was delivered already (its answer was lost on the way) is not written twice.
function transitions.beat(id, fence, lease, batch, fields, ...)
  if not holds(id, fence) then return 'fenced' end
  local pairs = {...}
  redis.call('ZADD', 'kd:leases', now + lease, id)
  set(id, 'heartbeat_at', now)
  if tonumber(batch) > tonumber(get(id, 'batch')) then
    redis.call('HSET', key(id), 'batch', batch)
    for i = 1, 2 * fields, 2 do
      if pairs[i] ~= 'cache.fingerprint' then redis.call('HSET', key(id), pairs[i], pairs[i + 1])
      elseif pairs[i + 1] ~= 'null' then uses(id, cjson.decode(pairs[i + 1])) end
    end
    for i = 2 * fields + 1, #pairs, 2 do
      emit(id, pairs[i], pairs[i + 1])
      if SERIES[pairs[i]] then plot(id, pairs[i], pairs[i + 1]) end
    end
  end
  return REPLY[get(id, 'status')]
end

-- advance(id, fence, stage) -> queued | cancelled | paused | failed | fenced
function transitions.advance(id, fence, stage)
  if not holds(id, fence) then return 'fenced' end
  for _, field in ipairs(redis.call('HKEYS', key(id))) do
    if string.sub(field, 1, 9) == 'progress.' then redis.call('HDEL', key(id), field) end
  end
  return stopped(id, 'stage', stage)
end

-- finish(id, fence, succeeded | failed, error) -> that status | fenced
function transitions.finish(id, fence, status, failure)
  if not holds(id, fence) then return 'fenced' end
  return move(id, status, 'error', failure)
end

-- release(id, fence) -> queued | cancelled | paused | failed | fenced: a clean stop, which costs no attempt
function transitions.release(id, fence)
  if not holds(id, fence) then return 'fenced' end
  return stopped(id)
end

-- fail_attempt(id, fence, error) -> queued | failed | cancelled | paused | fenced: the attempt died
function transitions.fail_attempt(id, fence, failure)
  if not holds(id, fence) then return 'fenced' end
  return died(id, failure)
end

-- ---------------------------------------------------------------- from the reconciler

-- expire(error) -> ids whose lease had run out
function transitions.expire(failure)
  local ids = redis.call('ZRANGEBYSCORE', 'kd:leases', '-inf', now, 'LIMIT', 0, 100)
  for _, id in ipairs(ids) do
    count('kd_lease_expirations_total', {})
    -- Whoever drove a search held nothing that could be lost: the next one goes on, and no attempt died.
    if get(id, 'stage') == 'search' then stopped(id) else died(id, failure) end
    redis.call('HSET', key(id), 'dispatched_at', 0)  -- the next call of hints announces it
  end
  return ids
end

-- due(error) -> ids whose deadline has passed
function transitions.due(failure)
  local ids = redis.call('ZRANGEBYSCORE', 'kd:deadlines', '-inf', now, 'LIMIT', 0, 100)
  for _, id in ipairs(ids) do
    redis.call('ZREM', 'kd:deadlines', id)
    local status = get(id, 'status')
    if status == 'running' or status == 'pausing' then
      redis.call('HSET', key(id), 'verdict', failure)
      move(id, 'cancelling', 'reason', 'deadline_exceeded')
    else
      move(id, 'failed', 'error', failure, 'reason', 'deadline_exceeded')
    end
  end
  return ids
end

-- Whether something that an open job must be listed in was lost; it is put back.
local function mended(id, lease)
  local status, stage, deadline = unpack(redis.call('HMGET', key(id), 'status', 'stage', 'deadline_at'))
  if not status or TERMINAL[status] then return redis.call('ZREM', 'kd:open', id) == 1 end
  if deadline and status ~= 'cancelling' then redis.call('ZADD', 'kd:deadlines', deadline, id) end
  if ACTIVE[status] then return redis.call('ZADD', 'kd:leases', 'NX', now + lease, id) == 1 end
  if status == 'queued' and not redis.call('ZSCORE', 'kd:queue:' .. stage, id) then
    queue(id)
    return true
  end
  if status ~= 'waiting' and status ~= 'paused' then return false end
  local before = get(id, 'version')
  for _, other in ipairs(redis.call('SMEMBERS', key(id, 'waits'))) do
    if not redis.call('ZSCORE', 'kd:open', other) then settle(id, other) end
  end
  if get(id, 'status') == 'waiting' and redis.call('SCARD', key(id, 'waits')) == 0 then enter(id) end
  return get(id, 'version') ~= before
end

-- mend(start, count, lease_ms) -> {where to go on, id, ...}: those of the open jobs that had lost their lease, their
-- place in the queue, or the word that what they wait for has ended. One call writes all of these at once, so that only
-- damage to Redis's data, or a script that failed half-way, can have lost them.
function transitions.mend(start, count, lease)
  local ids = redis.call('ZRANGE', 'kd:open', start, start + count - 1)
  local found = {#ids == tonumber(count) and start + count or 0}
  for _, id in ipairs(ids) do
    if mended(id, lease) then found[#found + 1] = id end
  end
  return found
end

-- hints(stage, age_ms) -> ids of queued jobs that nobody was told of for so long; they count as told of now.
-- While Celery's list still holds hints the workers have enough to go on, and more would only pile up.
function transitions.hints(stage, age)
  local ids = {}
  if redis.call('LLEN', 'kd:celery:' .. stage) > 0 then return ids end
  for _, id in ipairs(redis.call('ZRANGE', 'kd:queue:' .. stage, 0, 99)) do
    if now - get(id, 'dispatched_at') >= tonumber(age) then
      redis.call('HSET', key(id), 'dispatched_at', now)
      count('kd_reconciler_republished_total', {})
      ids[#ids + 1] = id
    end
  end
  return ids
end

-- webhooks(lease_ms, limit) -> {job, event id, url, failed tries, ...}: due ones, which nobody else gets meanwhile
function transitions.webhooks(lease, limit)
  local found = {}
  for _, entry in ipairs(redis.call('ZRANGEBYSCORE', 'kd:webhooks', '-inf', now, 'LIMIT', 0, limit)) do
    local id, event = string.match(entry, '^(%S+) (%S+)$')
    local url = get(id, 'webhook')
    if url then
      redis.call('ZADD', 'kd:webhooks', now + lease, entry)
      for _, value in ipairs({id, event, url, redis.call('HGET', 'kd:webhooks:tries', entry) or '0'}) do
        found[#found + 1] = value
      end
    else
      redis.call('ZREM', 'kd:webhooks', entry)
      redis.call('HDEL', 'kd:webhooks:tries', entry)
    end
  end
  return found
end

-- webhook(id, event, delay_ms, or '' where it is not to be tried again, warning or '') -> how many tries have failed
function transitions.webhook(id, event, delay, warning)
  local entry = id .. ' ' .. event
  if delay ~= '' then
    if not redis.call('ZSCORE', 'kd:webhooks', entry) then return 0 end
    redis.call('ZADD', 'kd:webhooks', now + delay, entry)
    return redis.call('HINCRBY', 'kd:webhooks:tries', entry, 1)
  end
  redis.call('ZREM', 'kd:webhooks', entry)
  redis.call('HDEL', 'kd:webhooks:tries', entry)
  if warning ~= '' and redis.call('EXISTS', key(id)) == 1 then
    emit(id, 'warning', cjson.encode({message = warning}))
  end
  return 0
end

-- ---------------------------------------------------------------- from who drives a search

-- journal(id, fence, line, ...) -> go | fenced: adds to a search's study
function transitions.journal(id, fence, ...)
  if not holds(id, fence) then return 'fenced' end
  redis.call('RPUSH', key(id, 'study'), ...)
  return 'go'
end

-- trial(id, fence, number, new_id, field, value, ...) -> the id of the trial's job, which is made once | fenced
function transitions.trial(id, fence, number, new, ...)
  if not holds(id, fence) then return 'fenced' end
  if redis.call('HSETNX', key(id, 'trials'), number, new) == 1 then
    transitions.create(new, get(id, 'owner'), '0', '', '', '', '', 'parent', id, ...)
    if get(id, 'status') == 'pausing' then transitions.change('pause', new) end
  end
  return redis.call('HGET', key(id, 'trials'), number)
end

-- ---------------------------------------------------------------- records of the version before

-- Format 1: no owners, indexes or queues; 'owner' was the worker; a cancel that waited was a field of a running job.
local function upgrade_job(id, created)
  local cancel, status, worker, config = unpack(redis.call('HMGET', key(id), 'cancel', 'status', 'owner', 'config'))
  if not status then return end
  if status == 'running' and cancel == '1' then status = 'cancelling' end
  redis.call('HDEL', key(id), 'cancel')
  set(id, 'format', FORMAT, 'owner', 'local', 'created_us', string.format('%.0f', created), 'status', status,
    'attempts_before', 0, 'max_attempts', 3, 'priority', 5, 'labels', '{}', 'depends_on', '[]')
  if ACTIVE[status] and worker then redis.call('HSET', key(id), 'worker', worker) end
  index(id, '*', 'add')
  index(id, status, 'add')
  if status == 'queued' then queue(id) end
  local read = cjson.decode(config).cache.fingerprint
  local made = get(id, 'cache.fingerprint')
  if made then uses(id, cjson.decode(made)) elseif type(read) == 'string' then uses(id, read) end
end

local function upgrade()
  local found = redis.call('GET', 'kd:format')
  if found == FORMAT then return end
  if found and tonumber(found) > tonumber(FORMAT) then
    local text = 'NEWERFORMAT the records are of format %s, and this version of Potstill knows %s: use the newer one.'
    return {err = string.format(text, found, FORMAT)}
  end
  local entries = redis.call('ZRANGE', 'kd:jobs', 0, -1, 'WITHSCORES')
  for i = 1, #entries, 2 do upgrade_job(entries[i], entries[i + 1]) end
  redis.call('DEL', 'kd:jobs')
  redis.call('SET', 'kd:format', FORMAT)
end

local refusal = upgrade()
if refusal then return refusal end
local answer = transitions[ARGV[1]](unpack(ARGV, 2))
local told = 1
while settling[told] do  -- not by recursion: a chain of jobs may be longer than the stack is deep
  settle(unpack(settling[told]))
  told = told + 1
end
return answer
