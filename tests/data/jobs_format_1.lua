-- Every key, every state, and every way from one state to another. One call is one transition,
-- and writes its event in the same breath: record and stream cannot disagree.
--
--            create              claim                  finish
--     (none) ------> queued -----------------> running ---------> succeeded | failed | cancelled
--                     |  ^                      |   | beat: stays; hears go, cancel or fenced
--              cancel |  '----------------------'
--                     v    advance (to the next stage), release (stopped, or died), expire (lease ran out);
--                 cancelled         each of them ends in cancelled instead where a cancel waits
--
-- kd:job:{id}           hash    the record: the truth about a job; nested values as JSON under dotted names
-- kd:job:{id}:events    stream  type and data (JSON) of what happened, about the last 10 000
-- kd:job:{id}:study     list    of a search: the journal of its Optuna study, one JSON line each
-- kd:job:{id}:trials    hash    of a search: number of a trial -> id of its job, whose 'parent' is the search
-- kd:jobs               zset    every job, by time of creation
-- kd:open               zset    the queued and running ones, by time of creation
-- kd:leases             zset    the running ones, by the time at which their lease ends
-- kd:idempotency:{sha}  string  "job-id body-sha" of a POST that carried an Idempotency-Key, for a day
-- kd:worker:{id}        string  a worker's own sign of life, with a TTL (worker.py writes it)
-- kd:celery:{stage}     list    Celery's: hints that a job is queued, never the truth
--
-- Fencing: claim hands out the next fence; whoever shows an older one is told "fenced" and changes nothing.
-- Attempts: a claim starts a new one only where the last one died ('fresh'); a clean stop is the same attempt.
-- A search is driven by the reconciler of an API, with a claim like any other; with it end the trials that are open.
-- Times are milliseconds of this server's clock. Commands are those of Redis 6.2. No cluster: keys are computed.

local DAY = 24 * 60 * 60
local TERMINAL = {succeeded = true, failed = true, cancelled = true}
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local transitions = {}

local function key(id) return 'kd:job:' .. id end

local function get(id, field) return redis.call('HGET', key(id), field) end

local function set(id, ...)
  redis.call('HSET', key(id), ...)
  redis.call('HINCRBY', key(id), 'version', 1)
end

local function emit(id, type, data)
  redis.call('XADD', key(id) .. ':events', 'MAXLEN', '~', 10000, '*', 'type', type, 'data', data)
end

local function describe(id)
  local fields = redis.call('HMGET', key(id), 'status', 'stage', 'attempt', 'error')
  return string.format('{"status":"%s","stage":"%s","attempt":%s,"error":%s}', unpack(fields))
end

local function expire_later(id, ...)
  for _, part in ipairs({...}) do redis.call('EXPIRE', key(id) .. part, 30 * DAY) end
end

local function move(id, status, ...)
  set(id, 'status', status, ...)
  if status ~= 'running' then redis.call('ZREM', 'kd:leases', id) end
  if status == 'queued' then set(id, 'queued_at', now, 'dispatched_at', now) end
  if TERMINAL[status] then
    set(id, 'finished_at', now)
    redis.call('ZREM', 'kd:open', id)
    for _, trial in ipairs(redis.call('HVALS', key(id) .. ':trials')) do transitions.cancel(trial) end
    expire_later(id, ':events', ':study', ':trials')
  end
  emit(id, 'status', describe(id))
  return status
end

local function requeue(id, ...)
  if get(id, 'cancel') == '1' then return move(id, 'cancelled') end
  return move(id, 'queued', ...)
end

local function died(id, failure, limit)
  if get(id, 'cancel') ~= '1' and tonumber(get(id, 'attempt')) >= tonumber(limit) then
    return move(id, 'failed', 'error', failure)
  end
  emit(id, 'warning', cjson.encode({message = cjson.decode(failure).detail}))
  return requeue(id, 'fresh', '1')
end

local function waits(id, stage)
  return get(id, 'status') == 'queued' and get(id, 'stage') == stage
end

local function holds(id, fence)
  return get(id, 'status') == 'running' and get(id, 'fence') == fence
end

-- create(id, key_sha or '', body_sha, field, value, ...) -> {created | replayed | conflict, id}
function transitions.create(id, sha, body, ...)
  if sha ~= '' then
    local earlier = redis.call('GET', 'kd:idempotency:' .. sha)
    if earlier then
      local other, other_body = string.match(earlier, '^(%S+) (%S+)$')
      return {other_body == body and 'replayed' or 'conflict', other}
    end
    redis.call('SET', 'kd:idempotency:' .. sha, id .. ' ' .. body, 'EX', DAY)
  end
  local created = clock[1] * 1000000 + clock[2]  -- microseconds, so that the order of creation is strict
  redis.call('ZADD', 'kd:jobs', created, id)
  redis.call('ZADD', 'kd:open', created, id)
  set(id, 'id', id, 'created_at', now, 'attempt', 0, 'fence', 0, 'fresh', '1', 'error', 'null', ...)
  move(id, 'queued')
  return {'created', id}
end

-- claim(id, stage, owner, lease_ms) -> {id, fence, attempt, config}, or nothing where it does not wait for that
function transitions.claim(id, stage, owner, lease)
  if not waits(id, stage) then return false end
  local fence = redis.call('HINCRBY', key(id), 'fence', 1)
  local attempt = redis.call('HINCRBY', key(id), 'attempt', get(id, 'fresh'))
  redis.call('HSETNX', key(id), 'started_at', now)
  redis.call('ZADD', 'kd:leases', now + lease, id)
  move(id, 'running', 'owner', owner, 'fresh', '0', 'batch', '0', 'heartbeat_at', now)
  return {id, fence, attempt, get(id, 'config')}
end

-- claim_oldest(stage, owner, lease_ms) -> the same, for the job that has waited longest: a stale hint is good for any
function transitions.claim_oldest(stage, owner, lease)
  for _, id in ipairs(redis.call('ZRANGE', 'kd:open', 0, -1)) do
    if waits(id, stage) then return transitions.claim(id, stage, owner, lease) end
  end
  return false
end

-- beat(id, fence, lease_ms, batch, field_count, field, value, ..., type, data, ...) -> go | cancel | fenced
-- A batch that was delivered already (its answer was lost on the way) is not written twice.
function transitions.beat(id, fence, lease, batch, count, ...)
  if not holds(id, fence) then return 'fenced' end
  local pairs = {...}
  redis.call('ZADD', 'kd:leases', now + lease, id)
  set(id, 'heartbeat_at', now)
  if tonumber(batch) > tonumber(get(id, 'batch')) then
    redis.call('HSET', key(id), 'batch', batch)
    for i = 1, 2 * count, 2 do redis.call('HSET', key(id), pairs[i], pairs[i + 1]) end
    for i = 2 * count + 1, #pairs, 2 do emit(id, pairs[i], pairs[i + 1]) end
  end
  return get(id, 'cancel') == '1' and 'cancel' or 'go'
end

-- advance(id, fence, stage) -> queued | cancelled | fenced
function transitions.advance(id, fence, stage)
  if not holds(id, fence) then return 'fenced' end
  for _, field in ipairs(redis.call('HKEYS', key(id))) do
    if string.sub(field, 1, 9) == 'progress.' then redis.call('HDEL', key(id), field) end
  end
  return requeue(id, 'stage', stage)
end

-- finish(id, fence, succeeded | failed | cancelled, error) -> that status | fenced
function transitions.finish(id, fence, status, failure)
  if not holds(id, fence) then return 'fenced' end
  return move(id, status, 'error', failure)
end

-- release(id, fence) -> queued | cancelled | fenced: a clean stop, which costs no attempt
function transitions.release(id, fence)
  if not holds(id, fence) then return 'fenced' end
  return requeue(id)
end

-- fail_attempt(id, fence, error, max_attempts) -> queued | failed | cancelled | fenced: the attempt died
function transitions.fail_attempt(id, fence, failure, limit)
  if not holds(id, fence) then return 'fenced' end
  return died(id, failure, limit)
end

-- cancel(id) -> the status now, or nothing for an unknown job. A running job hears it with its next beat.
function transitions.cancel(id)
  local status = get(id, 'status')
  if status == 'queued' then return move(id, 'cancelled', 'cancel', '1') end
  if status == 'running' and get(id, 'cancel') ~= '1' then
    set(id, 'cancel', '1')
    emit(id, 'cancel', '{}')
  end
  return status
end

-- expire(error, max_attempts) -> ids whose lease had run out
function transitions.expire(failure, limit)
  local ids = redis.call('ZRANGEBYSCORE', 'kd:leases', '-inf', now, 'LIMIT', 0, 100)
  for _, id in ipairs(ids) do
    -- Whoever drove a search held nothing that could be lost: the next one goes on, and no attempt died.
    if get(id, 'stage') == 'search' then requeue(id) else died(id, failure, limit) end
    redis.call('HSET', key(id), 'dispatched_at', 0)  -- the next call of hints announces it
  end
  return ids
end

-- hints(stage, age_ms) -> ids of queued jobs that nobody was told of for so long; they count as told of now.
-- While Celery's list still holds hints the workers have enough to go on, and more would only pile up.
function transitions.hints(stage, age)
  local ids = {}
  if redis.call('LLEN', 'kd:celery:' .. stage) > 0 then return ids end
  for _, id in ipairs(redis.call('ZRANGE', 'kd:open', 0, -1)) do
    if waits(id, stage) and now - get(id, 'dispatched_at') >= tonumber(age) then
      redis.call('HSET', key(id), 'dispatched_at', now)
      ids[#ids + 1] = id
    end
  end
  return ids
end

-- journal(id, fence, line, ...) -> go | fenced: adds to a search's study
function transitions.journal(id, fence, ...)
  if not holds(id, fence) then return 'fenced' end
  redis.call('RPUSH', key(id) .. ':study', ...)
  return 'go'
end

-- trial(id, fence, number, new_id, field, value, ...) -> the id of the trial's job, which is made once | fenced
function transitions.trial(id, fence, number, new, ...)
  if not holds(id, fence) then return 'fenced' end
  if redis.call('HSETNX', key(id) .. ':trials', number, new) == 1 then
    transitions.create(new, '', '', 'parent', id, ...)
  end
  return redis.call('HGET', key(id) .. ':trials', number)
end

return transitions[ARGV[1]](unpack(ARGV, 2))
